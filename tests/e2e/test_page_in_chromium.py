"""The page of a campaign in a real browser: Chromium, by Playwright. Nothing complains, and what can be pressed does what it says.

CHROMIUM names another executable than the one on the path.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from statedrift.store.campaigns import Campaign

from tests.unit.test_reports_page import ACCOUNT, CAMPAIGN, FILM, GATE, REACH, hostile_page, long_page, page_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright drives the browser: pip install playwright")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import msgspec

    campaign = Campaign(msgspec.structs.replace(CAMPAIGN.account, reach=REACH), CAMPAIGN.findings)
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_of(campaign, GATE, FILM, script="print('again')\n" * 40), encoding="utf-8")
    return path


def opened(browser: "Browser", path: Path, width: int = 1440, scheme: Any = "light", scripts: bool = True) -> tuple["Page", list[str]]:
    """The page, and what the browser complains of."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        java_script_enabled=scripts,
        permissions=["clipboard-read", "clipboard-write"],
    )
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
    page.goto(path.as_uri())
    return page, complaints


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_complains_and_nothing_is_wider_than_the_window(browser: "Browser", file: Path, width: int, scheme: str) -> None:
    page, complaints = opened(browser, file, width, scheme)
    for details in page.locator("details").all():
        details.evaluate("own => { own.open = true; }")
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *, header *")].filter((own) => own.getBoundingClientRect().right > innerWidth + 1
           && !own.closest(".scroll, pre, svg, .visually-hidden")).map((own) => own.outerHTML.slice(0, 200))"""
    )
    assert outside == []


def test_both_schemes_have_their_own_colours_and_both_can_be_read(browser: "Browser", file: Path) -> None:
    colours = set()
    for scheme in SCHEMES:
        page, _ = opened(browser, file, scheme=scheme)
        ink, paper = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
        colours.add((ink, paper))
        assert contrast(ink, paper) >= 7
        chart = page.evaluate("getComputedStyle(document.querySelector('.chart svg .role-axis-label text')).fill")
        assert contrast(chart, paper) >= 7
        tag = page.evaluate(
            "(() => { const own = getComputedStyle(document.querySelector('.tag.new')); return [own.color, own.backgroundColor]; })()"
        )
        assert contrast(*tag) >= 4.5
    assert len(colours) == 2


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours of the form rgb(r, g, b). Source: WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_slider_moves_the_picture_also_from_the_keyboard(browser: "Browser", file: Path) -> None:
    page, _ = opened(browser, file)
    film = page.locator(".film").first
    slider = film.locator("input[type=range]")

    def shown() -> list[str]:
        return [own.inner_text().split("\n")[0] for own in film.locator(".frame").all() if own.is_visible()]

    before = shown()
    assert len(before) == 1
    assert before[0].startswith("3")
    slider.focus()
    page.keyboard.press("Home")
    assert shown()[0].startswith("1")
    assert slider.get_attribute("aria-valuetext") == "1 of 3"
    page.keyboard.press("ArrowRight")
    assert shown()[0].startswith("2")


def test_the_copy_button_copies(browser: "Browser", file: Path) -> None:
    page, _ = opened(browser, file)
    button = page.locator("button.copy").first
    button.click()
    page.wait_for_function("document.querySelector('button.copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator(f"#{button.get_attribute('data-of')}").inner_text()


def test_a_column_is_sorted_both_ways(browser: "Browser", file: Path) -> None:
    page, _ = opened(browser, file)
    table = page.locator("table.sortable")

    def column() -> list[str]:
        return [own.strip() for own in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    table.get_by_role("button", name="family").click()
    assert column() == sorted(column())
    assert table.locator("th:nth-child(4)").get_attribute("aria-sort") == "ascending"
    table.get_by_role("button", name="family").press("Enter")
    assert column() == sorted(column(), reverse=True)
    assert len(set(column())) > 1
    table.get_by_role("button", name="found after").click()
    numbers = [int(own.replace(",", "")) for own in table.locator("tbody tr td:nth-child(6)").all_inner_texts()]
    assert numbers == sorted(numbers)


def test_a_link_opens_what_its_card_is_folded_into(browser: "Browser", file: Path) -> None:
    page, _ = opened(browser, file)
    folded = page.locator("main > details article.card").first
    assert not folded.is_visible()
    page.locator(f"a[href='#{folded.get_attribute('id')}']").click()
    folded.wait_for(state="visible")


def test_without_scripts_and_on_paper_the_step_that_parts_is_shown(browser: "Browser", file: Path) -> None:
    page, _ = opened(browser, file, scripts=False)
    assert [own.inner_text()[0] for own in page.locator(".film").first.locator(".frame").all() if own.is_visible()] == ["3"]
    assert not page.locator(".slider").first.is_visible()
    page.emulate_media(media="print")
    assert not page.locator("button.copy").first.is_visible()


def test_a_clean_page_opens_too(browser: "Browser", tmp_path: Path) -> None:
    (tmp_path / "clean.html").write_text(page_of(Campaign(ACCOUNT, ())), encoding="utf-8")
    page, complaints = opened(browser, tmp_path / "clean.html")
    assert complaints == []
    assert page.locator("h1").inner_text() == "no divergence in 2,412 programs"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [hostile_page, long_page])
def test_what_is_hostile_or_long_breaks_nothing(browser: "Browser", tmp_path: Path, make: Callable[[], str], width: int) -> None:
    (tmp_path / "page.html").write_text(make(), encoding="utf-8")
    page, complaints = opened(browser, tmp_path / "page.html", width)
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    for details in page.locator("details").all():
        details.evaluate("own => { own.open = true; }")
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".frame:visible").count() == 1
