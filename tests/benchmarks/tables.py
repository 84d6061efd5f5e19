"""Numbers and tables as text."""


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def size(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{number(count)} {unit}"
        count /= 1000


def spread(figure: dict[str, float], ends: tuple[int, int] = (10, 90)) -> str:
    low, high = (number(figure[f"p{end}"]) for end in ends)
    return f"{number(figure['median'])} [{low}-{high}]"


def table(header: list[str], rows: list[list[str]]) -> str:
    """An aligned Markdown table."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
