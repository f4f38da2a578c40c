"""gradiometer: the instrument panel of a PyTorch training step.

It measures every gradient, weight and update at every step, inside the compiled graph. It reports norms
that do not overflow, NaN and Inf by parameter name, and vanishing and exploding layers. It reads memory
once and does not wait for the device.
"""

import pathlib
import sys
import typing

from gradiometer.version import __version__

# Whether this process is `python -m gradiometer` or the script `gradiometer`, which may not need torch. While
# Python imports the package that -m names, "-m" is the program's name.
_NAME = pathlib.PurePath(*getattr(sys, "argv", [])[:1]).stem
_IS_MODULE = _NAME == "-m" and ("-m", __name__) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
_IS_COMMAND = _IS_MODULE or __name__ == _NAME

if typing.TYPE_CHECKING or not _IS_COMMAND:
    from gradiometer import rules, sinks
    from gradiometer.checks import (  # type: ignore[no-redef] # as below
        GradientReport,
        ModelReport,
        check_gradients,
        check_model,
        save_reference,
    )
    from gradiometer.columns import (
        ACTIVATION_COLUMNS,
        COLUMNS,
        DEFAULT_DEAD_THRESHOLD,
        DEFAULT_EXPLODING_THRESHOLD,
        DEFAULT_VANISHING_THRESHOLD,
        PAIR_COLUMNS,
        Fingerprint,
        Flag,
        Thresholds,
    )
    from gradiometer.control import (  # type: ignore[no-redef] # modules in there have these names too
        CoordCheck,
        CoordRow,
        ElementCounts,
        FiniteReport,
        GradientAgreement,
        GradientCosines,
        NoiseScale,
        PerTensorClip,
        WeightNormClip,
        ZScoreClip,
        check_deterministic,
        check_finite,
        clip_coefficient,
        clip_grad_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        collect_and_clip_,
        coord_check,
        inverse_scale,
        locate_nonfinite,
        share_found_inf_,
    )
    from gradiometer.distributed import RankError, Ranks
    from gradiometer.integrations import watch
    from gradiometer.monitor import Monitor
    from gradiometer.recorder import Recorder, StepRecord
    from gradiometer.rules import Finding, Severity
    from gradiometer.runs import Run, RunError, compare_runs, load_kept_step, read_run
    from gradiometer.stats import (  # type: ignore[no-redef] # as above
        EMA,
        ActivationReport,
        ActivationRow,
        ActivationStats,
        BlockLosses,
        ExponentStats,
        FormatFit,
        ModuleReports,
        PairReport,
        PairRow,
        PairStats,
        Pending,
        PrecisionReport,
        PrecisionRow,
        ProjectionStats,
        Report,
        Smoothed,
        Snapshot,
        Taps,
        TensorReport,
        TensorStats,
        block_losses,
        check_replicas,
        collect,
        collect_exponents,
        collect_grads,
        collect_projections,
        collect_updates,
        collect_weights,
        compare,
        fingerprint,
        grad_norm,
        group_ratio,
        materialize,
        materialize_async,
        precision_report,
        tap,
        tap_attention,
        tap_router,
        total_norm,
    )
    from gradiometer.web import write_page

else:

    def __getattr__(name: str) -> object:
        """Import all public names when one is first used."""
        if name not in __all__:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        from importlib import import_module  # noqa: PLC0415 seldom needed

        # each of these packages exports its public names as they are called here
        packages = (
            "checks columns control distributed integrations monitor recorder rules runs sinks stats web"
        )
        for package in packages.split():
            module = import_module(f"{__name__}.{package}")
            globals().update({known: getattr(module, known) for known in __all__ if known in module.__all__})
        return globals()[name]

    def __dir__() -> list[str]:
        """Return the names of the module, with those that are not imported yet."""
        return sorted({*globals(), *__all__})


__all__ = [
    "ACTIVATION_COLUMNS",
    "COLUMNS",
    "DEFAULT_DEAD_THRESHOLD",
    "DEFAULT_EXPLODING_THRESHOLD",
    "DEFAULT_VANISHING_THRESHOLD",
    "EMA",
    "PAIR_COLUMNS",
    "ActivationReport",
    "ActivationRow",
    "ActivationStats",
    "BlockLosses",
    "CoordCheck",
    "CoordRow",
    "ElementCounts",
    "ExponentStats",
    "Finding",
    "Fingerprint",
    "FiniteReport",
    "Flag",
    "FormatFit",
    "GradientAgreement",
    "GradientCosines",
    "GradientReport",
    "ModelReport",
    "ModuleReports",
    "Monitor",
    "NoiseScale",
    "PairReport",
    "PairRow",
    "PairStats",
    "Pending",
    "PerTensorClip",
    "PrecisionReport",
    "PrecisionRow",
    "ProjectionStats",
    "RankError",
    "Ranks",
    "Recorder",
    "Report",
    "Run",
    "RunError",
    "Severity",
    "Smoothed",
    "Snapshot",
    "StepRecord",
    "Taps",
    "TensorReport",
    "TensorStats",
    "Thresholds",
    "WeightNormClip",
    "ZScoreClip",
    "__version__",
    "block_losses",
    "check_deterministic",
    "check_finite",
    "check_gradients",
    "check_model",
    "check_replicas",
    "clip_coefficient",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "collect",
    "collect_and_clip_",
    "collect_exponents",
    "collect_grads",
    "collect_projections",
    "collect_updates",
    "collect_weights",
    "compare",
    "compare_runs",
    "coord_check",
    "fingerprint",
    "grad_norm",
    "group_ratio",
    "inverse_scale",
    "load_kept_step",
    "locate_nonfinite",
    "materialize",
    "materialize_async",
    "precision_report",
    "read_run",
    "rules",
    "save_reference",
    "share_found_inf_",
    "sinks",
    "tap",
    "tap_attention",
    "tap_router",
    "total_norm",
    "watch",
    "write_page",
]
