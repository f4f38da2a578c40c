"""The healthy kinds of run: each is a function that returns a new `Training`."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, RMSprop

from kernels_bench.zoo import data, models
from kernels_bench.zoo.optimizers import Lion, cosine, linear, restarts, stairs, warm_up
from kernels_bench.zoo.training import Training

KINDS = {}


def kind(make):
    """Add a kind to the table, under the function's name."""
    KINDS[make.__name__.replace("_", "-")] = make
    return make


def start(name, seed):
    """Return a new training of a kind; ``seed`` decides its weights and batches."""
    torch.manual_seed(1000 * sum(map(ord, name)) + seed)
    return KINDS[name]()


def classified(model, reduction="mean"):
    """Return the cross-entropy of a model's classes."""
    return lambda x, y: functional.cross_entropy(model(x), y, reduction=reduction)


def predicted(model):
    """Return the cross-entropy of a model's next characters."""
    return lambda x, y: functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def squared(model):
    """Return the mean squared error."""
    return lambda x, y: functional.mse_loss(model(x), y)


def single(model, optimizer, loss, batch, steps, **rest):
    """Return a training with one optimizer."""
    return Training(model, [optimizer], [loss], batch, steps, **rest)


# --- vectors ---


@kind
def mlp_sgd():
    model = models.mlp(32, 64, 64, 64, 10)
    return single(model, SGD(model.parameters(), 0.1), classified(model), data.clusters(), 200)


@kind
def mlp_adam_memorizes():
    model = models.mlp(32, 128, 128, 10)
    batch = data.fixed(data.clusters(64, noise=1.0))
    return single(model, Adam(model.parameters(), 3e-3), classified(model), batch, 300)


@kind
def mlp_full_batch():
    model = models.mlp(16, 64, 64, 1, activation=nn.Tanh)
    batch = data.fixed(data.regression(256))
    return single(model, SGD(model.parameters(), 0.05), squared(model), batch, 300)


@kind
def mlp_lion():
    model = models.mlp(32, 64, 64, 10, activation=nn.GELU)
    optimizer = Lion(model.parameters(), 3e-4, weight_decay=0.1)
    return single(model, optimizer, classified(model), data.clusters(), 240)


@kind
def mlp_rmsprop():
    model = models.mlp(32, 64, 64, 10)
    return single(model, RMSprop(model.parameters(), 1e-3), classified(model), data.clusters(), 200)


@kind
def mlp_targets_of_10000():
    model = models.mlp(16, 64, 64, 1)
    batch = data.regression(64, scale=2000.0, offset=1e4)
    return single(model, Adam(model.parameters(), 1e-2), squared(model), batch, 240)


@kind
def mlp_summed_loss():
    model = models.mlp(32, 64, 64, 10)
    loss = classified(model, "sum")
    return single(model, SGD(model.parameters(), 5e-4, momentum=0.9), loss, data.clusters(128), 240)


@kind
def mlp_batch_of_1_heavy_tails():
    model = models.mlp(16, 32, 1)
    noise = torch.distributions.StudentT(2.5, scale=0.3)
    batch = data.regression(1, noise=noise)
    return single(model, SGD(model.parameters(), 2e-3), squared(model), batch, 320)


@kind
def mlp_label_noise():
    model = models.mlp(32, 64, 64, 10)
    optimizer = AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    return single(model, optimizer, classified(model), data.clusters(noise=0.4), 240)


@kind
def mlp_curriculum():
    # from step 150 on, the classes overlap
    model = models.mlp(32, 64, 64, 10)
    easy = data.clusters()
    t = single(model, Adam(model.parameters(), 1e-3), classified(model), easy, 300)

    def batch():
        x, y = easy()
        return (x if t.step < 150 else x + 1.2 * torch.randn_like(x)), y

    t.batch = batch
    return t


@kind
def mlp_mu_p():
    model = models.mlp(32, 128, 128, 10, activation=nn.GELU)
    first, hidden, head = (module for module in model if isinstance(module, nn.Linear))
    nn.init.normal_(hidden.weight, std=128**-0.5)
    nn.init.zeros_(head.weight)
    groups = [{"params": first.parameters()}]
    groups += [{"params": module.parameters(), "lr": 2e-3 / 4} for module in (hidden, head)]
    schedule = cosine(200, least=0.1)
    return single(model, AdamW(groups, 2e-3), classified(model), data.clusters(), 200, schedule=schedule)


@kind
def mlp_dropout():
    model = models.mlp(32, 64, 64, 10, dropout=0.3)
    return single(model, Adam(model.parameters(), 2e-3), classified(model), data.clusters(), 240)


@kind
def mlp_cosine_restarts():
    model = models.mlp(32, 64, 64, 64, 10)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = restarts(75)
    return single(model, optimizer, classified(model), data.clusters(), 300, schedule=schedule)


@kind
def mlp_frozen_backbone():
    model = models.mlp(32, 64, 64, 10)
    model[:-1].requires_grad_(False)
    return single(model, Adam(model[-1].parameters(), 3e-3), classified(model), data.clusters(), 160)


@kind
def deepcopied_heads():
    # both start with the same weights, and learn from noisy labels of their own
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.first = models.mlp(32, 64, 64), models.mlp(64, 32, 10)
            self.second = copy.deepcopy(self.first)

        def forward(self, x):
            x = torch.relu(self.body(x))
            return self.first(x), self.second(x)

    model, draw = Twins(), data.clusters()

    def batch():
        x, y = draw()
        return x, *(torch.where(torch.rand(len(y)) < 0.1, torch.randint_like(y, 10), y) for _ in range(2))

    def loss(x, *labels):
        return sum(functional.cross_entropy(p, y) for p, y in zip(model(x), labels, strict=True))

    return single(model, Adam(model.parameters(), 1e-3), loss, batch, 200)


# --- pictures ---


@kind
def cnn_step_schedule():
    model = models.Convolutional()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = stairs(100, 160)
    t = single(model, optimizer, classified(model), data.images(), 200, schedule=schedule)
    t.before.append(lambda: validate(t) if t.step % 40 == 39 else None)
    return t


def validate(t):
    """Compute a loss in eval mode, and return to train mode."""
    t.model.eval()
    with torch.no_grad():
        t.losses[0](*t.batch())
    t.model.train()


@kind
def cnn_frozen_batch_norm():
    model = models.Convolutional()
    pretrain(model, data.images(), 40)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return single(model, Adam(trained, 1e-3), classified(model), data.images(), 160)


def pretrain(model, batch, steps):
    """Train a classifier before it is watched."""
    optimizer = Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        classified(model)(*batch()).backward()
        optimizer.step()
    optimizer.zero_grad()


@kind
def cnn_progressive_unfreezing():
    # a pretrained model on new classes: the head, then one more block every 60 steps
    model = models.Convolutional()
    pretrain(model, data.images(), 40)
    model.head.reset_parameters()
    model.blocks.requires_grad_(False)
    t = single(model, Adam(model.parameters(), 1e-3), classified(model), data.images(), 240)
    for i, block in enumerate(reversed(model.blocks)):
        t.at(60 * (i + 1), block.requires_grad_)
    return t


@kind
def resnet_zero_init():
    model = models.ResNet()
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    return single(model, optimizer, classified(model), data.images(), 200, schedule=cosine(200))


@kind
def resnet_constant_warm_up():
    # a tenth of the learning rate for 30 steps
    model = models.ResNet(zero=False)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def schedule(step):
        return 0.1 if step < 30 else 1.0

    return single(model, optimizer, classified(model), data.images(), 160, schedule=schedule)


@kind
def unet():
    model = models.UNet()

    def loss(x, mask):
        return functional.binary_cross_entropy_with_logits(model(x), mask)

    return single(model, Adam(model.parameters(), 2e-3), loss, data.discs(), 200)


@kind
def autoencoder():
    model = models.Autoencoder()

    def loss(x, _):
        return functional.mse_loss(model(x)[0], x.flatten(1))

    return single(model, Adam(model.parameters(), 1e-3), loss, data.images(), 240)


@kind
def vae():
    # the weight of the divergence rises for 100 steps
    model = models.Autoencoder(variational=True)

    def loss(x, _):
        y, divergence = model(x)
        return (y - x.flatten(1)).square().sum(1).mean() + min(1.0, t.step / 100) * divergence

    t = single(model, Adam(model.parameters(), 1e-3), loss, data.images(), 240)
    return t


@kind
def vit():
    model = models.ViT()
    optimizer = AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedule = warm_up(20, cosine(160, start=20))
    return single(model, optimizer, classified(model), data.images(), 160, schedule=schedule)


# --- sequences ---


@kind
def lstm():
    model = models.Recurrent(nn.LSTM, 16, vocabulary=32)
    return single(model, Adam(model.parameters(), 5e-3), predicted(model), data.text(), 200, clip=1.0)


@kind
def gru():
    model = models.Recurrent(nn.GRU, 2)
    return single(model, RMSprop(model.parameters(), 1e-3), squared(model), data.adding(), 200, clip=1.0)


@kind
def gpt():
    model = models.GPT()
    optimizer = AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = warm_up(20, cosine(240, start=20, least=0.1))
    return single(model, optimizer, predicted(model), data.text(), 240, schedule=schedule, clip=1.0)


@kind
def gpt_tied_linear_to_0():
    model = models.GPT(tied=True)
    optimizer = AdamW(model.parameters(), 2e-3)
    return single(model, optimizer, predicted(model), data.text(), 200, schedule=linear(200))


@kind
def gpt_normal_embeddings():
    # torch's default, N(0, 1), and no warm-up
    model = models.GPT(std=None)
    return single(model, Adam(model.parameters(), 1e-3), predicted(model), data.text(), 160)


@kind
def gpt_accumulation():
    model = models.GPT()
    optimizer = AdamW(model.parameters(), 2e-3)
    schedule = warm_up(10)
    return single(
        model, optimizer, predicted(model), data.text(4), 100, accumulate=4, clip=1.0, schedule=schedule
    )


@kind
def gpt_fp16_loss_scale():
    # gradients overflow as in fp16, and the scaler skips those steps
    model = models.GPT(layers=1)
    for p in model.parameters():
        p.register_hook(lambda grad: grad.half().float())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=40)
    return single(model, AdamW(model.parameters(), 2e-3), predicted(model), data.text(), 160, scaler=scaler)


@kind
def gpt_moe():
    model = models.GPT(experts=6, layers=2)

    def loss(x, y):
        main = predicted(model)(x, y)
        return main + 0.01 * sum(block.mlp.balance for block in model.blocks)

    schedule = warm_up(20)
    return single(model, AdamW(model.parameters(), 2e-3), loss, data.text(8), 200, schedule=schedule)


@kind
def gpt_lora():
    model, optimizer = models.GPT(), None
    optimizer = Adam(model.parameters(), 3e-3)
    before = data.text()
    for _ in range(60):
        optimizer.zero_grad()
        predicted(model)(*before()).backward()
        optimizer.step()
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block.attention, name, models.LoRA(getattr(block.attention, name)))
        block.mlp[0], block.mlp[2] = models.LoRA(block.mlp[0]), models.LoRA(block.mlp[2])
    trained = [p for p in model.parameters() if p.requires_grad]
    return single(model, AdamW(trained, 3e-3), predicted(model), data.text(), 200, schedule=warm_up(10))


@kind
def transformer_encoder():
    model = models.Encoder()
    return single(model, Adam(model.parameters(), 1e-3), predicted(model), data.text(), 160)


# --- several models, two towers, graphs, tables ---


@kind
def gan():
    generator, judge = (
        models.mlp(8, 64, 64, 2),
        models.mlp(2, 64, 64, 1, activation=lambda: nn.LeakyReLU(0.2)),
    )
    model = nn.ModuleDict({"generator": generator, "discriminator": judge})

    def bce(x, real):
        logits = judge(x)
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def judged(real):
        judge.requires_grad_()
        generator.requires_grad_(requires_grad=False)
        with torch.no_grad():
            fake = generator(torch.randn(len(real), 8))
        return bce(real, 1.0) + bce(fake, 0.0)

    def generated(real):
        judge.requires_grad_(requires_grad=False)
        generator.requires_grad_()
        return bce(generator(torch.randn(len(real), 8)), 1.0)

    optimizers = [Adam(part.parameters(), 1e-3, betas=(0.5, 0.999)) for part in (judge, generator)]
    t = Training(model, optimizers, [judged, generated], data.points(), 240)
    t.after.append(model.requires_grad_)
    return t


@kind
def diffusion_ema():
    student = models.Denoiser()
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = nn.ModuleDict({"model": student, "ema": teacher})

    def loss(x):
        time, noise = torch.rand(len(x)), torch.randn_like(x)
        angle = time[:, None] * torch.pi / 2
        return functional.mse_loss(student(angle.cos() * x + angle.sin() * noise, time), noise)

    t = single(model, Adam(student.parameters(), 2e-3), loss, data.points(), 240)
    t.after.append(lambda: follow(teacher, student, 0.99))
    return t


def follow(teacher, student, decay):
    """Move a teacher's weights toward the student's."""
    with torch.no_grad():
        torch._foreach_lerp_([*teacher.parameters()], [*student.parameters()], 1 - decay)


@kind
def mean_teacher():
    # a few labels, and the teacher's classes of another view
    student = models.Convolutional()
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = nn.ModuleDict({"student": student, "teacher": teacher})

    def loss(x, y):
        with torch.no_grad():
            target = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        p = student(x)
        consistency = functional.mse_loss(p.softmax(1), target)
        return functional.cross_entropy(p[:8], y[:8]) + min(1.0, t.step / 80) * consistency

    optimizer = SGD(student.parameters(), 0.05, momentum=0.9, nesterov=True)
    t = single(model, optimizer, loss, data.images(), 200)
    t.after.append(lambda: follow(teacher, student, 0.98))
    return t


@kind
def two_towers():
    model = models.Towers()

    def loss(x, y):
        p, same = model(x, y), torch.arange(len(x))
        return (functional.cross_entropy(p, same) + functional.cross_entropy(p.T, same)) / 2

    return single(model, AdamW(model.parameters(), 1e-3), loss, data.views(), 240)


@kind
def siamese():
    # one encoder for both pictures, and a margin: many pairs have no loss
    model, draw = models.Convolutional(classes=8), data.images(32)

    def batch():
        (x, a), (y, b) = draw(), draw()
        return x, y, (a == b).float()

    def loss(x, y, same):
        away = (model(x) - model(y)).square().sum(1)
        return (same * away + (1 - same) * torch.relu(1 - (away + 1e-6).sqrt()).square()).mean()

    return single(model, Adam(model.parameters(), 1e-3), loss, batch, 200)


@kind
def graph_network():
    model = models.GraphNetwork()

    def loss(x, adjacency, y):
        return functional.cross_entropy(model(x, adjacency)[:100], y[:100])

    return single(model, Adam(model.parameters(), 1e-2, weight_decay=5e-4), loss, data.graph(), 200)


@kind
def recommender():
    model = models.Recommender()

    def loss(user, item, rating):
        return functional.mse_loss(model(user, item), rating)

    return single(model, Adam(model.parameters(), 3e-3), loss, data.ratings(), 240)


# --- reinforcement learning ---


@kind
def policy_gradient():
    # advantage actor-critic
    model, poles = models.ActorCritic(), models.CartPoles()

    def batch():
        seen, taken, rewards, ends = [], [], [], []
        with torch.no_grad():
            for _ in range(16):
                seen.append(poles.state)
                taken.append(torch.distributions.Categorical(logits=model(poles.state)[0]).sample())
                reward, end = poles.step(taken[-1])
                rewards.append(reward)
                ends.append(end)
            value, returns = model(poles.state)[1], []
            for reward, end in zip(reversed(rewards), reversed(ends), strict=True):
                value = reward + 0.95 * torch.where(end, 0.0, value)
                returns.insert(0, value)
        return torch.cat(seen), torch.cat(taken), torch.cat(returns)

    def loss(x, action, returns):
        logits, value = model(x)
        policy = torch.distributions.Categorical(logits=logits)
        advantage = returns - value.detach()
        gain = (policy.log_prob(action) * (advantage - advantage.mean()) / (advantage.std() + 1e-5)).mean()
        return functional.smooth_l1_loss(value, returns) * 0.5 - gain - 0.01 * policy.entropy().mean()

    return single(model, Adam(model.parameters(), 2e-3), loss, batch, 160, clip=0.5)


@kind
def dqn():
    online = models.mlp(4, 64, 64, 2)
    target = copy.deepcopy(online).requires_grad_(False)
    model, poles = nn.ModuleDict({"online": online, "target": target}), models.CartPoles(8)
    memory = []

    def play():
        state = poles.state
        with torch.no_grad():
            best = online(state).argmax(1)
        action = torch.where(torch.rand(8) < max(0.05, 1 - t.step / 150), torch.randint(2, (8,)), best)
        _, end = poles.step(action)
        memory.extend(zip(state, action, end.float(), poles.state, strict=True))
        del memory[:-4000]

    def batch():
        for _ in range(2 if memory else 20):
            play()
        chosen = [memory[i] for i in torch.randint(len(memory), (64,)).tolist()]
        return tuple(torch.stack(part) for part in zip(*chosen, strict=True))

    def loss(state, action, end, after):
        with torch.no_grad():
            value = 1 + 0.97 * (1 - end) * target(after).amax(1)
        return functional.smooth_l1_loss(online(state).gather(1, action[:, None]).squeeze(1), value)

    t = single(model, Adam(online.parameters(), 1e-3), loss, batch, 300, clip=10.0)
    t.after.append(lambda: target.load_state_dict(online.state_dict()) if t.step % 50 == 49 else None)
    return t
