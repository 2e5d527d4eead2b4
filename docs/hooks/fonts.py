"""Fonts of the site, from installed packages: only the characters that pages may show, compressed."""

from __future__ import annotations

import importlib.resources
from io import BytesIO

from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

# File on the site, package, file in the package.
FONTS = (
    ("roboto-regular", "font_roboto", "files/Roboto-Regular.ttf"),
    ("roboto-italic", "font_roboto", "files/Roboto-Italic.ttf"),
    ("roboto-medium", "font_roboto", "files/Roboto-Medium.ttf"),
    ("roboto-bold", "font_roboto", "files/Roboto-Bold.ttf"),
    ("stix-two-math", "ziamath", "fonts/STIXTwoMath-Regular.ttf"),
)
LATIN = (*range(0x20, 0x7F), *range(0xA0, 0x100), *range(0x391, 0x3D0), *range(0x2010, 0x2040))
TEXT = (*LATIN, *range(0x100, 0x180), 0x20AC, 0x2122)
# Arrows, operators, angle brackets, and letters in the mathematical styles.
MATH = (*range(0x300, 0x310), *range(0x2190, 0x2196), *range(0x21D0, 0x21D5), *range(0x2200, 0x226C), 0x2225, 0x22A4, 0x22A5,
        0x22C5, *range(0x22EE, 0x22F2), *range(0x2308, 0x230C), 0x27E8, 0x27E9)  # fmt: skip
# Letters, Latin and Greek, in italics.
LETTERS = (*range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C), 0x210E, 0x2113)


def on_files(files: Files, config: MkDocsConfig, **_: object) -> Files:
    """Add the fonts to the files of the site."""
    for name, package, path in FONTS:
        source = importlib.resources.files(package).joinpath(path).read_bytes()
        characters = TEXT if package == "font_roboto" else (*LATIN, *MATH, *LETTERS)
        content = compressed(source, characters)
        files.append(File.generated(config, f"assets/fonts/{name}.woff2", content=content))
    return files


def compressed(font: bytes, characters: tuple[int, ...]) -> bytes:
    """The font with these characters only, as woff2."""
    # The last three are what mathematics needs: script sizes, dotless letters under accents, flat accents.
    options = Options(flavor="woff2", layout_features=["kern", "mark", "mkmk", "ssty", "dtls", "flac"])
    loaded = TTFont(BytesIO(font))
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=characters)
    subsetter.subset(loaded)
    loaded.flavor = "woff2"
    out = BytesIO()
    loaded.save(out)
    return out.getvalue()
