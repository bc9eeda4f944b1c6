"""The page in headless Chromium: it picks, asks, slides, hovers, compares, refuses, and asks nobody but its server."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from llava_consensus.demo.desk import samples
from llava_consensus.evaluation import models

ROOT = Path(__file__).parents[2]
MINI = ROOT / "playground" / "mini"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
PATIENCE = 120_000  # milliseconds, on a machine that does a lot else
MEGABYTES = 1.0  # of an upload at most

pytest.importorskip("gradio", reason="pip install 'llava-consensus[demo]'")
pytest.importorskip("matplotlib", reason="pip install 'llava-consensus[demo]'")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")


class Open(NamedTuple):
    """A page in a browser, and every address it asked for."""

    page: Any
    addresses: list[str]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The page about the embedded model, on a free port."""
    from llava_consensus.demo import app

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        host = models.load("checkpoints/llava-mini")
    blocks = app.build(host, str(ROOT / "checkpoints/llava-mini"), samples(MINI), MEGABYTES)
    yield app.launch(blocks, "127.0.0.1", None, MEGABYTES)
    blocks.close()


@pytest.fixture(scope="module")
def opened(server: str) -> Iterator[Open]:
    """The page with its first answers."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE)
        addresses: list[str] = []
        page.on("request", lambda request: addresses.append(request.url))
        page.goto(server)
        page.wait_for_selector(".cd-answer")
        yield Open(page, addresses)
        browser.close()


def columns(page: Any, part: str) -> list[str]:
    """The text of a part of both columns."""
    texts: list[str] = page.locator(f".cd-column {part}").all_inner_texts()
    return texts


def wait(page: Any, part: str, place: int, words: str) -> None:
    """Until a part of a column says something."""
    playwright.expect(page.locator(f".cd-column {part}").nth(place)).to_contain_text(
        re.compile(words), timeout=PATIENCE
    )


def typed(page: Any, name: str, words: str) -> None:
    """A question typed, or a method chosen by its name, and Enter."""
    box = page.locator(f"#{name} input").first
    box.fill(words)
    box.press("Enter")


def test_a_visitor_is_shown_answers_at_once(opened: Open) -> None:
    page = opened.page
    assert columns(page, "h3") == ["ConsensusDrop", "random"]
    assert all("64 of 576 tokens" in facts and "ms to the first token" in facts for facts in columns(page, ".cd-facts"))


def test_pointing_at_a_patch_tells_what_became_of_it(opened: Open) -> None:
    page = opened.page
    picture = page.locator(".cd-picture").first
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    said = set()
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 0.5 * box["height"])
        wait(page, ".cd-readout", 0, "rank")
        said.add(columns(page, ".cd-readout")[0])
    assert len(said) == 5
    assert all(re.search(r"rank \d+ of 576 by fused .*\n.*vision .*, cross .*, fused", text) for text in said)
    assert any("kept as it is" in text or "merged into a token of" in text for text in said)
    picture.focus()
    before = columns(page, ".cd-readout")[0]
    page.keyboard.press("ArrowDown")
    assert columns(page, ".cd-readout")[0] != before


def test_saliencies_are_maps_and_a_method_without_one_says_so(opened: Open) -> None:
    page = opened.page
    page.get_by_label("question saliency (cross)").check()
    page.wait_for_selector('.cd-picture[data-view="cross"]')
    assert "no cross saliency" in columns(page, ".cd-message")[0]
    page.get_by_label("kept and merged").check()
    page.wait_for_selector('.cd-column:first-child .cd-picture[data-view="selection"]')


def test_the_slider_changes_what_the_model_is_given(opened: Open) -> None:
    page = opened.page
    number = page.locator("#tokens input[type=number]")
    number.fill("32")
    number.press("Tab")
    for place in (0, 1):
        wait(page, ".cd-facts", place, r"32 of 576")


def test_two_methods_are_compared(opened: Open) -> None:
    page = opened.page
    typed(page, "right", "vision-only")
    wait(page, "h3", 1, "vision-only")
    assert columns(page, "h3")[0] == "ConsensusDrop"


def test_one_method_answers_two_questions(opened: Open) -> None:
    page = opened.page
    typed(page, "first", "Is there a dog in the picture?")
    wait(page, ".cd-question", 0, "a dog")
    typed(page, "second", "Is there a car in the picture?")
    wait(page, ".cd-question", 1, "a car")
    assert columns(page, ".cd-question")[0] == "Is there a dog in the picture?"


def test_picking_another_example_asks_about_it(opened: Open) -> None:
    page = opened.page
    before, question = page.locator("#thumbnail img").get_attribute("src"), columns(page, ".cd-question")[0]
    page.locator("#examples .thumbnail-item").nth(2).click()
    page.wait_for_function("before => document.querySelector('#thumbnail img').src !== before", arg=before)
    playwright.expect(page.locator(".cd-question").first).not_to_have_text(question, timeout=PATIENCE)


def test_an_upload_is_asked_about_and_what_is_no_picture_is_refused(opened: Open, tmp_path: Path) -> None:
    page = opened.page
    files = page.locator("input[type=file]").first
    before = page.locator("#thumbnail img").get_attribute("src")
    Image.new("RGB", (90, 60), (200, 40, 40)).save(tmp_path / "red.png")
    files.set_input_files(tmp_path / "red.png")
    page.wait_for_function("before => document.querySelector('#thumbnail img').src !== before", arg=before)
    playwright.expect(page.locator("#message")).to_contain_text("knows drawn scenes", timeout=PATIENCE)
    playwright.expect(page.locator(".cd-question").first).to_have_text("What is in the picture?", timeout=PATIENCE)
    uploaded = page.locator("#thumbnail img").get_attribute("src")
    (tmp_path / "notes.png").write_text("no picture")
    files.set_input_files(tmp_path / "notes.png")
    said = page.get_by_text("notes.png: not a picture")
    playwright.expect(said).to_be_visible(timeout=PATIENCE)
    assert str(tmp_path) not in said.inner_text()
    assert page.locator("#thumbnail img").get_attribute("src") == uploaded, "the picture before it stays"
    page.locator("#first input").first.click()  # nothing covers it
    page.keyboard.press("Escape")


def test_an_oversized_upload_is_refused_with_the_limit(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "big.png").write_bytes(b"x" * 1_200_000)
    opened.page.locator("input[type=file]").first.set_input_files(tmp_path / "big.png")
    said = opened.page.get_by_text(re.compile("exceed the maximum allowed size"))
    playwright.expect(said.first).to_be_visible(timeout=PATIENCE)
    assert "big.png" in said.first.inner_text()


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_answer_is_in_sight_after_ask(opened: Open, size: tuple[int, int]) -> None:
    page = opened.page
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.evaluate("scrollTo(0, 0)")
    page.locator("#ask").click()
    page.wait_for_function("scrollY > 0")
    playwright.expect(page.locator(".cd-answer").first).to_be_in_viewport(ratio=1, timeout=PATIENCE)
    page.set_viewport_size({"width": 1280, "height": 900})


def test_every_tab_stop_is_somewhere(opened: Open) -> None:
    page = opened.page
    page.locator("#examples .thumbnail-item").first.focus()
    reached = []
    while len(reached) < 30 and "cd-picture" not in reached:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className.toString() || document.activeElement.tagName"))
    assert "BODY" not in reached and reached[-1] == "cd-picture", reached
    playwright.expect(page.locator("[role=listbox]")).to_have_count(0)  # a menu that was left is closed


def test_a_phone_shows_it_without_scrolling_sideways(opened: Open) -> None:
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 900})


def test_nobody_but_the_own_server_is_asked(opened: Open, server: str) -> None:
    outside = [address for address in opened.addresses if not address.startswith((server, "data:", "blob:"))]
    assert opened.addresses and outside == []
    policy = opened.page.request.get(server).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy


def test_only_this_machine_is_served(server: str) -> None:
    assert server.startswith("http://127.0.0.1:")
