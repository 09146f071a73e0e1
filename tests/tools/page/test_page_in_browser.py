"""The page's pictures, in a real browser."""

import pytest
import torch
from browser import OpenPage, browser
from page_records import HOSTILE, LIMIT, entry, record_of

from overflow_fast.tools.page.incidents import Incident
from overflow_fast.tools.page.render import write_page

pytestmark = pytest.mark.slow

BLACK, GREY = (0, 0, 0), (153, 153, 153)


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(chromium):
    return OpenPage(chromium.new_page())


@pytest.fixture
def opened(page, tmp_path):
    """Opens a page of records; no page may have had any trouble until the next."""

    def open_(records, incidents=(), color_scheme="light"):
        assert page.troubles == []
        page.open(write_page(tmp_path / "run.html", records, incidents), color_scheme)
        page.tab.locator("#app, main:not(:has(#app))").wait_for()
        page.wait()
        return page

    yield open_
    assert page.troubles == []


def blocks(num_steps=10):
    """Two blocks of three outputs, a head, and a weight; the second one overflows."""
    names = [f"h.{i}.{name}" for i in range(2) for name in ("ln", "attn", "mlp")]
    entries = [*map(entry, names), entry("head"), entry("head", "weight", "weight")]
    high = torch.full((num_steps, len(entries)), LIMIT / 2)
    high[:, 3] = LIMIT / 64
    nans = torch.zeros_like(high)
    nans[num_steps // 2, 4] = 2
    high[0, 6] = float("nan")
    return high, entries, nans


@pytest.mark.day
def test_pointing_at_a_cell_tells_module_step_and_magnitude(opened, as_kept):
    page = opened([record_of(*blocks())])
    as_kept(page.hover(0.95, 2), page.hover(0.55, 1))
    assert "not checked" in page.hover(0.05, 2)
    assert page.colour(0.55, 1) == BLACK
    assert page.colour(0.05, 2) == GREY
    assert page.colour(0.35, 2) == (239, 138, 98)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_cure_is_in_the_first_screen_of_a_phone_to_be_copied(opened, scheme):
    op = {"name": "div", "file": "/gone/model.py", "line": 5, "code": "y = x / s"}
    code = "y = x / torch.where(s == 0, 1e-8, s)"
    cure = {"text": "1e-8 for 0", "code": code, "tried": True, "is_finite": True}
    cure |= {"file": "/gone/model.py", "line": 5, "loss": 0.5}
    found = {"cause": "undefined", "op": op, "remedies": [cure]}
    incident = Incident(3, {"sentences": ["Step 3 is not finite."]}, found)
    page = opened([record_of(*blocks())], [incident], color_scheme=scheme)
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.tab.wait_for_function("document.documentElement.scrollWidth == 390")
    button = page.tab.get_by_role("button", name="Copy", exact=True)
    box = button.bounding_box()
    assert box["y"] + box["height"] < 844 and box["x"] + box["width"] <= 390
    button.focus()
    page.tab.keyboard.press("Enter")
    page.tab.get_by_role("button", name="Copied").or_(
        page.tab.get_by_role("button", name="Selected")
    ).wait_for()
    assert page.tab.evaluate("getSelection().toString()").strip() == code
    page.tab.emulate_media(media="print")
    assert not page.tab.locator(".cure .copy").is_visible()


def test_an_incident_fits_a_phone_and_its_place_can_be_copied(opened):
    path = "/home/somebody/" + "a_folder_with_a_long_name/" * 4 + "model.py"
    names = ("`fc.weight`", "")
    tensor = {"dtype": "float16", "shape": [2], "abs_min": 0.0, "abs_max": 1.0}
    tensors = [{**tensor, "num_nan": 1, "num_inf": 0, "name": name} for name in names]
    op = {"name": "div", "file": path, "line": 5, "code": "y = x / s"}
    code = "return torch.nn.functional.softmax(scores.float(), dim=-1).to(scores.dtype)"
    cure = {"text": "float32", "code": code, "tried": True, "is_finite": True}
    cure |= {"file": path, "line": 5, "loss": 0.5}
    found = {"cause": "undefined", "op": {**op, "inputs": tensors}, "remedies": [cure]}
    found["news"] = "`x` is up to 962 in this batch"
    incident = Incident(3, {"sentences": ["Step 3 is not finite."]}, found)
    page = opened([record_of(*blocks())], [incident])
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.tab.wait_for_function("document.documentElement.scrollWidth == 390")
    cut = "e => e.scrollWidth > e.clientWidth"
    assert not page.tab.locator(".cure pre").evaluate(cut)
    assert "`" not in page.tab.locator("#incident").inner_text()
    assert page.tab.locator("dl").inner_text().startswith("New")
    page.tab.get_by_role("button", name="Copy the place").click()
    assert page.tab.evaluate("getSelection().toString()") == f"{path}:5"


def test_rows_keep_their_colours_when_they_are_scrolled(opened):
    entries = [entry(f"layers.{i}") for i in range(200)]
    high = torch.full((2, 200), LIMIT / 2)
    high[:, 150] = float("nan")
    nans = torch.zeros_like(high)
    nans[:, 150] = 1
    page = opened([record_of(high, entries, nans)])
    for top in (0, 2000, 2240):
        page.tab.evaluate(
            "top => { document.getElementById('rows').scrollTop = top }", top
        )
        page.wait()
        is_seen = top // 16 <= 150 < top // 16 + 20
        rows = [page.colour(0.5, i) for i in range(20)]
        assert (BLACK in rows) == is_seen
        assert not is_seen or rows.index(BLACK) == 150 - top // 16


def test_what_is_beside_a_wide_table_stays_on_a_phone_s_screen(opened):
    page = opened([record_of(*blocks(100))])
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.wait()
    for caption in page.tab.locator("caption").all():
        box = caption.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_the_legend_s_numbers_stand_apart_on_a_phone_s_screen(opened):
    page = opened([record_of(*blocks())])
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.wait()
    marks = [each.bounding_box() for each in page.tab.locator("#bits i").all()]
    ends = [box["x"] + box["width"] for box in marks]
    assert len(marks) == 6
    assert all(end <= box["x"] for end, box in zip(ends, marks[1:], strict=False))
    assert ends[-1] <= 390


def test_words_of_a_printed_table_stay_whole(opened):
    page = opened([record_of(*blocks(100))])
    page.tab.set_viewport_size({"width": 720, "height": 1000})
    page.tab.emulate_media(media="print")
    page.wait()
    cell = page.tab.get_by_role("cell", name="float16", exact=True).first
    assert cell.bounding_box()["height"] < 30
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= 720


def test_a_printed_page_is_no_wider_than_the_paper(opened):
    code = "overflow_fast.keep_in_fp32(model, ['encoder.layers.0.ffn.down'], until=[])"
    cure = {"text": "run it in float32", "code": code, "tried": True, "file": "/m.py"}
    cure |= {"is_finite": True, "line": 5, "loss": 0.5}
    cure |= {"outcome": "finite, loss 0.5; the other samples stay as they are"}
    incident = Incident(3, {}, {"cause": "undefined", "remedies": [cure, cure]})
    page = opened([record_of(*blocks(100))], [incident])
    page.tab.set_viewport_size({"width": 720, "height": 1000})
    page.tab.emulate_media(media="print")
    page.wait()
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= 720
    # What a change costs stands beside the code to copy, and in the table.
    assert page.tab.get_by_text("the other samples stay as they are").count() == 3


def test_a_click_and_the_keyboard_unfold_a_block(opened):
    page = opened([record_of(*blocks())])
    page.click_name(1)
    assert "\nh.1.attn: output" in page.hover(0.55, 3)
    assert page.colour(0.55, 2) != BLACK
    page.click_name(1)
    assert "\nhead: output" in page.hover(0.55, 2)
    page.tab.locator("#heat").focus()
    page.press("Home", "ArrowUp", "ArrowUp", "Enter", "ArrowDown")
    assert "\nh.0.ln: output" in page.press("ArrowRight")
    assert "step 1:" in page.readout
    page.tab.click("#fold")
    page.wait()
    assert "\nhead: output" in page.hover(0.5, 8)


def test_searching_and_switches_choose_the_rows(opened):
    page = opened([record_of(*blocks())])
    page.tab.fill("#find", "ATTN")
    page.wait()
    assert "\nh.0.attn" in page.hover(0.5, 1) or "attn" in page.readout
    page.tab.fill("#find", "no such module")
    page.wait()
    page.tab.fill("#find", "")
    page.tab.get_by_label("weights", exact=True).check()
    page.tab.get_by_label("outputs", exact=True).uncheck()
    page.wait()
    assert "\nhead: weight" in page.hover(0.5, 0)


def test_zooming_in_on_steps(opened):
    page = opened([record_of(*blocks(100))])
    page.tab.mouse.move(*page.at(0.501, 1))
    page.tab.mouse.down()
    page.tab.mouse.move(*page.at(0.515, 1))
    page.tab.mouse.up()
    page.wait()
    assert "step 50:" in page.hover(0.2, 1) and page.colour(0.2, 1) == BLACK
    assert "step 51:" in page.hover(0.8, 1)
    page.tab.locator("#heat").focus()
    page.press("0")
    assert "step 80:" in page.hover(0.805, 1)
    page.press("+")
    assert "step 80:" in page.hover(0.81, 1)
    page.tab.click("#zoom-all")
    assert "step 0:" in page.hover(0.001, 1)


def test_a_row_opens_into_its_ranks(opened, as_kept):
    records = [
        record_of(torch.full((4, 2), LIMIT / 2 ** (i + 1)), rank=i, world_size=64)
        for i in range(64)
    ]
    page = opened(records)
    page.tab.click("#fold")
    page.click_name(0)
    as_kept(page.hover(0.9, 1), page.hover(0.9, 3))


def test_counts_have_their_own_picture(opened):
    counts = {"num_zero": torch.tensor([[0, 100], [-1, 1]])}
    page = opened([record_of(torch.ones(2, 2), counts=counts)])
    page.tab.select_option("#show", "num_zero")
    page.tab.click("#fold")
    page.wait()
    assert "no zero value" in page.hover(0.2, 0)
    assert "not counted" in page.hover(0.8, 0)
    assert page.colour(0.8, 0) == GREY
    assert "about 100" in page.hover(0.2, 1) or "of 100 values" in page.readout
    assert page.colour(0.2, 1) == (63, 0, 125)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_names_are_drawn(opened, scheme):
    entries = [entry(name) for name in HOSTILE]
    record = record_of(torch.ones(3, len(entries)), entries, run=HOSTILE[0])
    page = opened([record], color_scheme=scheme)
    for row, name in enumerate(HOSTILE[:-1]):
        assert f"\n{name}: output" in page.hover(0.5, row)
    assert page.tab.evaluate("typeof isBroken") == "undefined"


def test_an_empty_page(opened):
    opened([])


def test_a_page_without_javascript(chromium, tmp_path):
    page = OpenPage(chromium.new_page(java_script_enabled=False))
    page.open(write_page(tmp_path / "run.html", [record_of(*blocks())]))
    assert page.tab.locator("noscript").is_visible()
    assert "h.1.attn: output" in page.tab.locator("table").first.inner_text()
    assert page.troubles == []


def test_many_steps(opened, as_kept):
    old = [(i, i + 15) for i in range(0, 96_000, 16)]
    spans = old + [(i, i) for i in range(96_000, 100_000)]
    high = torch.full((len(spans), 1), LIMIT / 2)
    high[-2] = LIMIT
    page = opened([record_of(high, spans=spans)])
    as_kept(page.hover(0.0, 0))
    page.tab.locator("#heat").focus()
    as_kept(page.press("End"), page.press("ArrowLeft"))


def test_a_run_far_from_any_maximum_shows_its_differences(opened):
    high = torch.stack([LIMIT / 2.0 ** torch.tensor([40.0, 50.0])] * 4)
    high[2:] *= 8
    page = opened([record_of(high)])
    assert page.tab.locator("#bits").inner_text().split() == ["37.0", "50.0", "bits"]
    assert len({page.colour(part, row) for part in (0.1, 0.9) for row in (0, 1)}) == 4


def test_a_value_near_its_maximum_has_the_fixed_scale(opened):
    page = opened([record_of(torch.tensor([[1e-20, 1.0]]))])
    assert page.tab.locator("#bits").inner_text().split()[-2:] == ["32", "bits"]


@pytest.mark.parametrize(("scheme", "rgb"), [("light", BLACK), ("dark", (255, 212, 0))])
def test_what_is_not_finite_stands_out_from_the_ground(opened, scheme, rgb):
    page = opened([record_of(*blocks())], color_scheme=scheme)
    assert page.colour(0.55, 1) == rgb
