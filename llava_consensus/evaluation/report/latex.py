r"""Tables as LaTeX (package booktabs), to be \input into a paper. Pure functions of text."""

from llava_consensus.evaluation.report.columns import Table

SPECIAL = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "<": "$<$",
    ">": "$>$",
}


def escape(text: str) -> str:
    """Plain text as LaTeX shows it."""
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def table(content: Table) -> str:
    """A booktabs table: names to the left, numbers to the right, a rule and a heading for each group."""
    width = len(content.head)
    lines = [_line(content.head)]
    for group in content.groups:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{c}}{{\textit{{{escape(group.heading)}}}}} \\"]
        lines += [_line(cells) for cells in group.lines]
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering\small",
            rf"\caption{{{escape(f'{content.title}. {content.note}'.rstrip())}}}",
            rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}",
            r"\toprule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _line(cells: tuple[str, ...]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"
