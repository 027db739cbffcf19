"""Probes of the general domain: all sizes, types and memory layouts that the family is defined for.

They are written in bfloat16 with the official head_dim and heads, unless a size is what a probe is
about; the domain draws them again in other types and sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...definition import Case, Layout, TensorSpec
from .arrays import KEY_CACHES
from .cases import HEAD_DIM, Setting, Shape

_USUAL: Shape = (2, 3, 5)
_AROUND_POWERS_OF_TWO = (15, 16, 17, 31, 33)
_HEAD_DIMS = (2, 10, 64, 96, 192, 256)


def general_probes(setting: Setting) -> tuple[Case, ...]:
    """Return the general probes of an operator."""
    cases = [*_empty(setting), *_sizes(setting), *_values(setting), *_layouts(setting)]
    cases.append(_wide_stride(setting))
    if setting.is_backward:
        cases += _head_sums(setting)
    else:
        cases += _shared_tables(setting)
    return tuple(cases)


def _random_kind(setting: Setting) -> str:
    return "positions_shuffled" if setting.is_static else "official"


def _empty(setting: Setting) -> Iterator[Case]:
    """No new tokens, nothing cached, neither, no batch entries."""
    rows = "no row is written" if setting.is_static else "the cache returned as the output"
    shapes = [
        ("no-new-tokens", (2, 0, 5), f"N = 0: a grid without programs; {rows}"),
        ("no-tokens-at-all", (2, 0, 0), "no new tokens and no rows: nothing to do, and no error"),
        ("no-batch", (0, 3, 5), "B = 0: nothing to do, and no error"),
    ]
    if not setting.is_static:
        shapes.append(("nothing-cached", (2, 5, 0), "C = 0: the states returned as the output"))
    for name, shape, exposes in shapes:
        yield setting.case(name, _random_kind(setting), shape, exposes, domain="general")


def _sizes(setting: Setting) -> Iterator[Case]:
    """Sizes of one, around powers of two, no powers of two, and above one block."""
    kind = _random_kind(setting)

    def sized(
        name: str, shape: Shape, exposes: str, *, heads: int | None = None, head_dim: int = HEAD_DIM
    ) -> Case:
        return setting.case(
            name, kind, shape, exposes, heads=heads, head_dim=head_dim, domain="general"
        )

    yield sized("one-batch-entry", (1, 3, 5), "B = 1 with the other sizes above one")
    yield sized("one-head", (2, 3, 5), "H = 1 with the other sizes above one", heads=1)
    yield sized("one-new-token", (2, 1, 5), "N = 1 with the other sizes above one")
    yield sized("one-pair", (1, 1, 1), "all sizes as small as they can be", heads=1, head_dim=2)
    for count in _AROUND_POWERS_OF_TWO:
        rows = count + 3 if setting.is_static else 3
        yield sized(f"tokens-{count}", (1, count, rows), "masks of a tile of new tokens")
    for heads in (3, 5, *_AROUND_POWERS_OF_TWO):
        yield sized(f"heads-{heads}", (2, 2, 3), "masks of a tile of heads", heads=heads)
    for width in _HEAD_DIMS:
        yield sized(
            f"head-dim-{width}", _USUAL, "padding or masks of head_dim", heads=3, head_dim=width
        )
    yield sized("head-dim-6", (4, 3, 5), "columns past head_dim rotated", heads=8, head_dim=6)
    different = (2, 5, 11 if setting.is_static else 7)
    yield sized("different-sizes", different, "one axis taken for another", heads=3, head_dim=8)
    for name, codes in (("keep-narrow", "codes_kept"), ("turn-narrow", "codes_turned")):
        yield setting.case(
            name,
            codes,
            different,
            "pairing, signs and places in heads of eight",
            heads=3,
            head_dim=8,
            domain="general",
        )


def _values(setting: Setting) -> Iterator[Case]:
    static = setting.is_static
    yield setting.case(
        "large-angles",
        "large_angles",
        (2, 16, 17 if static else 1),
        "tables made again from positions, in too few bits",
        domain="general",
    )
    yield setting.case(
        "signalling-nan-copies",
        "signalling_copies",
        (2, 2, 5),
        "copies that pass through arithmetic or another type",
        domain="general",
    )


# Layouts in memory


def _transposed(spec: TensorSpec) -> Layout:
    """Lie in memory as models make it: ``[B,S,H,D]``; tables with the tokens outermost."""
    if "num_kv_heads" in spec.axes:
        return Layout(order=(0, 2, 1, 3))
    return Layout(order=(2, 0, 1, 3) if len(spec.axes) == 4 else (1, 0, 2))


def _every_second_row(spec: TensorSpec) -> Layout:
    return Layout(steps=(*(1,) * (len(spec.axes) - 2), 2, 1))


def _cut(spec: TensorSpec, gap: int = 8) -> Layout:
    """Lie in wider rows: by eight elements, which keep 16-byte alignment, or any other number."""
    return Layout(gaps=(*(0,) * (len(spec.axes) - 1), gap))


def _every_second_column(spec: TensorSpec) -> Layout:
    return Layout(steps=(*(1,) * (len(spec.axes) - 1), 2))


_EXPANDED_BATCH = Layout(expanded=(0,))
_EXPANDED_HEADS = Layout(expanded=(1,))
_UNALIGNED = Layout(offset=3)


def _layouts(setting: Setting) -> Iterator[Case]:
    """One input after the other in every layout, then all together."""
    floating = [spec for spec in setting.inputs if spec.indexes is None]

    def laid_out(name: str, layouts: dict[str, Layout], exposes: str) -> Case:
        return setting.case(
            name, _random_kind(setting), _USUAL, exposes, layouts=layouts, domain="general"
        )

    for spec in floating:
        one = {
            "transposed": (_transposed(spec), "dimensions swapped in memory"),
            "every-second-row": (_every_second_row(spec), "every second row of a longer one"),
            "cut": (_cut(spec), "columns cut from wider rows"),
            "expanded": (_EXPANDED_BATCH, "one batch entry expanded with stride 0"),
            "unaligned": (_UNALIGNED, "a start inside a buffer, off the 16-byte grid"),
        }
        for how, (layout, description) in one.items():
            yield laid_out(f"{how}-{spec.name}", {spec.name: layout}, f"{spec.name}: {description}")
    with_heads = [spec for spec in floating if "num_kv_heads" in spec.axes]
    together = {
        "all-transposed": ({s.name: _transposed(s) for s in floating}, "[B,S,H,D] in memory"),
        "all-cut": ({s.name: _cut(s, gap=1) for s in floating}, "rows off the 16-byte grid"),
        "all-every-second-column": (
            {s.name: _every_second_column(s) for s in floating},
            "the last dimension strided",
        ),
        "all-expanded-heads": (
            {s.name: _EXPANDED_HEADS for s in with_heads},
            "one head expanded to all with stride 0",
        ),
        "all-unaligned": ({s.name: _UNALIGNED for s in floating}, "every start off the grid"),
    }
    for name, (layouts, description) in together.items():
        yield laid_out(name, layouts, f"all inputs: {description}")
    if setting.is_static:
        yield laid_out(
            "every-second-position",
            {"cache_position": Layout(steps=(2,))},
            "cache_position: every second entry of a longer tensor",
        )
        yield laid_out(
            "position-inside",
            {"cache_position": Layout(offset=1)},
            "cache_position: a start inside a longer tensor",
        )


def _wide_stride(setting: Setting) -> Case:
    """A cache whose batch entries lie 2^30 elements apart: the stride fits 32 bits, thrice it not.

    (A stride of 2^31 itself proves nothing in Triton, which then types the argument as 64 bits.)
    """
    cache = next(spec for spec in setting.inputs if spec.name in KEY_CACHES)
    rows = 16
    new = 3
    apart = 2**30 // (rows * HEAD_DIM)
    # In concat.backward the cotangent has the new rows too.
    cached = rows - new if setting.is_backward and not setting.is_static else rows
    return setting.case(
        "wide-stride",
        _random_kind(setting),
        (4, new, cached),
        f"{cache.name}: index times stride formed in 32 bits",
        group="large",
        layouts={cache.name: Layout(gaps=(0, apart - setting.heads, 0, 0))},
        domain="general",
        needs_gpu=True,
    )


def _shared_tables(setting: Setting) -> Iterator[Case]:
    """Tables of one row for all batch entries, which forward operators take too."""
    kinds = {
        "shared-tables": (_random_kind(setting), ("cos", "sin")),
        "shared-cos": (_random_kind(setting), ("cos",)),
        "shared-sin": (_random_kind(setting), ("sin",)),
        "shared-tables-by-position": ("tables_by_position", ("cos", "sin")),
        "shared-halves": ("halves_differ", ("cos", "sin")),
    }
    for name, (kind, tables) in kinds.items():
        exposes = f"{' and '.join(tables)} of one row for all batch entries"
        yield setting.case(name, kind, (3, 4, 5), exposes, broadcast=tables, domain="general")


def _head_sums(setting: Setting) -> Iterator[Case]:
    """Sums over few, many and odd numbers of heads."""
    sums = (
        ("head-powers", "head_powers", 3, "a mean, one head, or no sum at all"),
        ("head-large-first", "head_large_first", 32, "adding up heads one by one in the type"),
        ("many-head-codes", "head_codes", 33, "heads beyond one block missing from the sum"),
        ("many-head-absorption", "head_absorption", 33, "many heads added in low precision"),
        ("odd-head-cancellation", "head_cancellation", 5, "heads that nearly cancel"),
        ("odd-head-ties", "head_ties", 3, "head sums truncated, or ties rounded away from zero"),
    )
    for name, kind, heads, exposes in sums:
        yield setting.case(name, kind, _USUAL, exposes, heads=heads, domain="general")
