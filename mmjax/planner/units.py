"""Numbers as text, with the unit that fits."""


def format_bytes(count: float) -> str:
    """`1,234.5 MiB`"""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def format_flops(count: float) -> str:
    """`1.2 GFLOP`"""
    for unit in ("", "K", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:,.4g} {unit}FLOP"
        count /= 1000
    return f"{count:,.4g} EFLOP"


def format_seconds(seconds: float) -> str:
    """`3.21 ms`"""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:,.2f} s" if seconds else "0 s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
