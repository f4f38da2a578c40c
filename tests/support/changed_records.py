"""Records with other numbers than a synthetic run makes."""

from __future__ import annotations

from dataclasses import replace

from gradiometer.recorder import Table


def changed(record, change, *kinds):
    """Return a record with copies of tables, those of these kinds or all, that ``change(table)`` wrote to."""
    tables = dict(record.tables)
    for name in kinds or record.tables:
        if name not in tables:
            continue
        old = tables[name]
        bits = None if old.fingerprints is None else old.fingerprints.clone()
        tables[name] = Table(
            old.kind, old.rows, old.values.clone(), thresholds=record.thresholds, fingerprints=bits
        )
        change(tables[name])
    return replace(record, tables=tables)


def column(table, name):
    """Return a raw column of a table, ``(N,)``, to write to."""
    return table.values[:, table.kind.schema.index[name]]
