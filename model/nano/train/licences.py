"""Which installed distributions may be trained on. Decides from package metadata only, and refuses what it cannot read."""

import re
from email.message import Message

# Each maps a pattern on one licence term to the short name that the data sheet prints.
PERMISSIVE = (
    (r"mit(-0|-cmu)?|mit license|the mit license|expat( license)?|mit license \(mit\)", "MIT"),
    (r"(new |modified |simplified )?(0bsd|bsd)([ -]?[0-4])?([ -]clause)?(-lbnl)?( license)?( \(.*\))?", "BSD"),
    (r"(3|2|new)-clause bsd( license)?|bsd license|bsd 3-clause \"new\" or \"revised\" license", "BSD"),
    (r"apache([ -]?(software )?(licen[cs]e)?,?( version)?[ -]?(v)?2(\.0)?)?( licen[cs]e)?( 2\.0)?", "Apache-2.0"),
    (r"apache software license|apache license,? version 2\.0", "Apache-2.0"),
    (r"psf(-2\.0)?|python(-2\.0(\.1)?)?|python software foundation license|cnri-python", "PSF-2.0"),
    (r"isc( license)?( \(iscl\))?", "ISC"),
    # Seen only beside one of the above, for bundled parts that are not Python.
    (r"zlib|cc0-1\.0|bsl-1\.0|apache-2\.0 with llvm-exception", "other permissive"),
)


def _classify(term: str) -> str | None:
    term = term.strip().lower()
    for pattern, name in PERMISSIVE:
        if re.fullmatch(pattern, term):
            return name
    return None


def _join(terms: list[str]) -> str | None:
    """One short licence string if every term is permissive, else None."""
    names = [_classify(term) for term in terms]
    if not names or any(name is None for name in names):
        return None
    return " AND ".join(sorted({name for name in names if name is not None}))


def permissive_licence(metadata: Message) -> str | None:
    """Short licence name of a distribution, or None if it is missing, unknown or not permissive.

    Sources in order: the SPDX `License-Expression`, the trove classifiers, a one-line `License` field.
    An expression must be permissive in every term, `OR` included: nothing is decided in its favour.
    """
    expression = metadata.get("License-Expression")
    if expression:
        return _join(re.split(r"\s+(?:AND|OR)\s+", re.sub(r"[()]", "", expression)))
    prefix = "License ::"
    classifiers = [c.split("::")[-1] for c in metadata.get_all("Classifier") or [] if c.startswith(prefix)]
    classifiers = [c for c in classifiers if c.strip() != "OSI Approved"]
    if classifiers:
        return _join(classifiers)
    field = (metadata.get("License") or "").strip()
    if not field or "\n" in field or len(field) > 80:
        return None
    return _join(re.split(r"\s+(?:AND|OR|and|or)\s+|\s*[,/]\s+", field))
