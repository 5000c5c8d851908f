"""The page in a real browser: it renders, answers to the reader, and lets nothing in or out."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from small_sweep import COLUMNS, NASTY, ROWS, SEEDS, write_sweep

from fedeve import datasets, simulate
from fedeve.experiments import config
from fedeve.report import exports, page, results, tables

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 4"><style>* { fill: #12ab34 }</style>'
    '<rect id="same" width="9" height="3"/></svg>'
)
FIRST, SECOND = COLUMNS
Opener = Callable[..., Any]


def write(folder: Path, path: Path) -> Path:
    page.write_page(path, results.read([folder]), title="A page <b>", made="made & kept")
    return path


@pytest.fixture(scope="session")
def written(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small sweep's page, with a run under way and two figures."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("page") / "sweep"))
    record = folder / "runs/fedavgm-0.1-226/record.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:4]))
    (folder / "one.svg").write_text(SVG)
    (folder / "two.svg").write_text(SVG.replace("<rect", "<script>document.title='x'</script><rect"))
    items = [{"title": f"Figure {n}", "svg": f"{n}.svg", "reading": "It <i>grows</i>."} for n in ("one", "two", "gone")]
    (folder / "figures.json").write_text(json.dumps(items))
    return write(folder, folder / "report.html")


@pytest.fixture
def opened(browser: Any, written: Path) -> Iterator[Opener]:
    """Opens a page; in the end nothing may have been fetched, logged or thrown."""
    contexts, noise = [], []

    def opener(path: Path = written, *, width: int = 1200, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, accept_downloads=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: noise.append(message.text))
        tab.on("pageerror", lambda error: noise.append(str(error)))
        tab.on("request", lambda request: noise.append(request.url) if request.url.startswith("http") else None)
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached")
        return tab

    yield opener
    for context in contexts:
        context.close()
    assert noise == []


def charts(tab: Any) -> Any:
    """The charts, drawn."""
    tab.locator(".curves").first.scroll_into_view_if_needed()
    for number in range(tab.locator(".plot").count()):
        tab.locator(".plot").nth(number).scroll_into_view_if_needed()
        tab.locator(".plot").nth(number).locator(".main-svg").first.wait_for()
    return tab.locator(".plot")


def saved(tab: Any, button: Any) -> str:
    with tab.expect_download() as download:
        button.click()
    return Path(download.value.path()).read_text()


def names(tab: Any, table: int = 0) -> list[str]:
    return list(tab.locator("table").nth(table).locator("tbody th").all_inner_texts())


def visible(tab: Any, chart: int = 0) -> dict[str, Any]:
    """The lines of a chart: whether each is shown, as plotly has it."""
    script = "(p) => Object.fromEntries(p.data.filter((t) => t.showlegend !== false).map((t) => [t.name, t.visible]))"
    return dict(tab.locator(".plot").nth(chart).evaluate(script))


def test_the_same_results_give_the_same_page_and_nothing_in_it_points_outside(made: Path, tmp_path: Path) -> None:
    one, two = write(made, tmp_path / "one.html"), write(made, tmp_path / "two.html")
    text = one.read_text()
    assert text == two.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", text)
    addresses = set(re.findall(r"https?://[^\s\"'<]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches
    assert "A page &lt;b&gt;" in text and "made &amp; kept" in text and "<script>alert" not in text
    assert not re.findall(r"\$[a-z_]+\b", text.split('<script type="application/gzip"')[0])
    packed = re.search(r'id="data">([^<]*)<', text)
    assert packed is not None
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert [run["seed"] for run in data["sections"][0]["runs"]][: len(SEEDS)] == list(SEEDS)


@pytest.mark.browser
def test_tables_show_ours_beside_the_printed_with_states_and_reasons(opened: Opener, written: Path) -> None:
    tab = opened()
    assert names(tab) == [*ROWS, NASTY, "SCAFFOLD", "FedOpt"]
    section = results.read([written.parent]).sections[0]
    cell = tables.tables(section)[0].cells["FedEve", 0]
    shown = tab.locator("table").first.locator("tbody tr").nth(2).locator("td").first.inner_text()
    assert f"{cell.mean:.2f} ± {cell.deviation:.2f}" in shown and "printed 55.00 ± 0.50" in shown
    text = tab.locator("table").first.inner_text()
    assert "failed: <b>out of memory</b>" in text and "not run" in text and "(2 of 3 seeds)" in text
    assert tab.locator("table").first.locator("td.best").count() == 2
    assert tab.locator(".notes").inner_text() == "Not <real>."
    tests = tab.locator(".tables").nth(1).inner_text()
    assert "FedEve against each other method" in tests and "p 0." in tests and "Holm" in tests
    tab.locator(".tables").nth(1).locator("button.value").first.click()
    assert tab.locator("dialog summary").count() == 2 * len(SEEDS)


@pytest.mark.browser
def test_tables_sort_by_click_and_by_key_and_what_has_no_value_stays_below(opened: Opener, written: Path) -> None:
    tab = opened()
    table = tables.tables(results.read([written.parent]).sections[0])[0]
    best = sorted(ROWS, key=lambda row: -table.cells[row, 0].mean)
    head = tab.locator("table").first.locator("th button.sort").nth(1)
    head.click()
    assert (
        names(tab)[:3] == best
        and tab.locator("table").first.locator("th").nth(1).get_attribute("aria-sort") == "descending"
    )
    head.press("Enter")
    assert names(tab)[:3] == best[::-1] and set(names(tab)[3:]) == {NASTY, "SCAFFOLD", "FedOpt"}
    tab.locator("table").first.locator("th button.sort").first.click()
    assert names(tab) == sorted(names(tab), key=str.lower)


@pytest.mark.browser
def test_a_click_on_a_number_shows_the_runs_behind_it(opened: Opener, written: Path, tmp_path: Path) -> None:
    tab = opened()
    tab.locator("table").first.locator("tbody tr").nth(2).locator("button.value").first.click()
    dialog = tab.locator("dialog")
    assert dialog.is_visible() and "FedEve" in dialog.locator("h2").inner_text()
    assert [text.split(":")[0] for text in dialog.locator("summary").all_inner_texts()] == [f"seed {s}" for s in SEEDS]
    record = written.parent / "runs/fedeve-0.3-192/record.jsonl"
    header = json.loads(record.read_text().splitlines()[0])
    text = dialog.inner_text()
    assert str(record) in text and header["identity"] in text and f"torch {header['versions']['torch']}" in text
    assert json.loads(dialog.locator("pre").first.inner_text()) == header["config"]
    path = tmp_path / "run.json"
    path.write_text(saved(tab, dialog.get_by_role("button", name="Save").first))
    again = simulate(config.check(config.read(path)).build())
    assert again.header["identity"] == header["identity"]
    tab.keyboard.press("Escape")
    assert not dialog.is_visible()
    tab.get_by_text("failed", exact=True).first.click()
    assert "failed: <b>out of memory</b>" in dialog.inner_text()


@pytest.mark.browser
def test_the_buttons_save_what_the_command_writes(opened: Opener, written: Path) -> None:
    tab = opened()
    section = results.read([written.parent]).sections[0]
    for kind, name in (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX")):
        button = tab.locator(".exports").first.get_by_role("button", name=name)
        assert saved(tab, button) == exports.WRITERS[kind]([(section, tables.tables(section)[:1])])


@pytest.mark.browser
def test_curves_are_drawn_and_their_legends_and_boxes_toggle_all_charts(opened: Opener) -> None:
    tab = opened()
    assert charts(tab).count() == 4  # accuracy, loss, gain, both drifts
    assert visible(tab) == visible(tab, 2) == dict.fromkeys(ROWS, True)
    drifts = tab.locator(".plot").nth(3).evaluate("(p) => p.data.filter((t) => t.customdata).map((t) => t.line.dash)")
    assert visible(tab, 3) == dict.fromkeys(ROWS, True) and set(drifts) == {"solid", "dot"}
    buttons = tab.locator(".plot").first.locator(".modebar-btn").evaluate_all("(all) => all.map((b) => b.ariaLabel)")
    assert buttons == [
        "Download plot",
        "Zoom",
        "Pan",
        "Zoom in",
        "Zoom out",
        "Reset axes",
    ]  # and none that sends it away
    tab.locator(".plot").first.locator(".legendtoggle").first.click()
    box = tab.get_by_role("checkbox", name="FedAvg", exact=True)
    expect(box).not_to_be_checked()
    assert visible(tab)["FedAvg"] == "legendonly" == visible(tab, 1)["FedAvg"]
    box.press("Space")
    assert visible(tab) == dict.fromkeys(ROWS, True)
    tab.get_by_role("checkbox", name="FedEve", exact=True).uncheck()
    assert [visible(tab, number)["FedEve"] for number in range(4)] == ["legendonly"] * 4


@pytest.mark.browser
def test_a_curve_is_the_mean_over_seeds_and_its_csv_says_so(opened: Opener, written: Path) -> None:
    tab = opened()
    charts(tab)
    section = results.read([written.parent]).sections[0]
    records = [e.record for e in section.entries if (e.row, e.column) == ("FedEve", FIRST) and e.record]
    expected = sum(100 * record.metric("accuracy") for record in records) / len(records)
    lines = saved(tab, tab.locator(".save-curves").first).splitlines()
    found = [line.split(",") for line in lines if line.startswith('"FedEve"')]
    assert [int(line[1]) for line in found] == records[0].evaluated.tolist()
    assert [float(line[2]) for line in found] == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.browser
def test_the_reader_chooses_quantity_column_smoothing_band_and_axes(opened: Opener) -> None:
    tab = opened()
    charts(tab)
    plot = tab.locator(".plot").first
    before = plot.evaluate("(p) => p.data.at(-1).y")
    tab.locator(".smooth").fill("5")
    assert plot.evaluate("(p) => p.data.at(-1).y") != before and "5 points" in tab.locator("output").inner_text()
    tab.locator(".smooth").fill("1")
    tab.locator(".band").select_option("none")
    assert plot.evaluate("(p) => p.data.length") == len(ROWS)
    tab.locator(".band").select_option("seeds")
    assert plot.evaluate("(p) => p.data.length") == len(ROWS) * (1 + len(SEEDS))
    tab.locator(".log-y").first.check()
    tab.locator(".log-x").first.check()
    assert plot.evaluate("(p) => [p.layout.xaxis.type, p.layout.yaxis.type]") == ["log", "log"]
    tab.locator(".quantity").first.select_option("fact:client_drift")
    assert "client drift" in plot.evaluate("(p) => p.layout.yaxis.title.text")
    tab.locator(".choice").select_option(label="FedEve")
    assert (
        list(visible(tab, 0)) == [FIRST, SECOND] and "all columns of FedEve" in tab.locator(".curves h3").inner_text()
    )
    tab.locator(".choice").select_option(label=SECOND)
    assert list(visible(tab, 1)) == list(ROWS)


@pytest.mark.browser
def test_values_stand_under_the_pointer_and_a_click_traces_the_curve(opened: Opener) -> None:
    tab = opened()
    charts(tab).first.scroll_into_view_if_needed()
    box = tab.locator(".plot").first.locator(".nsewdrag").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + box["height"] / 2)
    hover = tab.locator(".plot").first.locator(".hoverlayer .legend")
    for word in ("round 8", "FedEve", "3 seeds"):
        expect(hover).to_contain_text(word)
    tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.locator("dialog[open]").wait_for()
    assert FIRST in tab.locator("dialog h2").inner_text()


@pytest.mark.browser
def test_rounds_to_reach_a_value_follow_the_readers_value(opened: Opener, written: Path) -> None:
    tab = opened()
    section = results.read([written.parent]).sections[0]
    records = [e.record for e in section.entries if (e.row, e.column) == ("FedAvg", FIRST) and e.record]
    goal = min(100 * record.metric("accuracy").max() for record in records) - 1e-6
    firsts = [int(record.evaluated[100 * record.metric("accuracy") >= goal][0]) for record in records]
    tab.locator(".reach input").fill(str(goal))
    cell = tab.locator(".reach tbody tr").first.locator("td").first.inner_text()
    expected = sum(firsts) / len(firsts)
    examples = float(f"{expected * 5 * 60:.3g}")  # five clients a round, sixty examples each, three digits
    assert cell.startswith(f"{int(expected + 0.5)} rounds") and f"≈ {examples:,.0f} examples" in cell
    tab.locator(".reach tbody tr").first.locator("button").first.click()
    assert tab.locator("dialog summary").count() == len(SEEDS)
    tab.keyboard.press("Escape")
    tab.locator(".reach input").fill("100.5")
    assert "not reached" in tab.locator(".reach tbody tr").first.inner_text()


@pytest.mark.browser
def test_the_list_of_runs_has_time_and_steps_and_can_be_searched(opened: Opener) -> None:
    tab = opened()
    tab.locator(".runs summary").click()
    first = tab.locator(".runs tbody tr").first.inner_text()
    assert "1.5" in first and "240" in first and "160" in first and "3,600" in first and "record.jsonl" in first
    tab.locator(".runs input[type=search]").fill("FedAvgM 226")
    shown = tab.locator(".runs tbody tr:not([hidden])").all_inner_texts()
    assert len(shown) == 2 and "unfinished: 6 of 12 rounds" in shown[1]


@pytest.mark.browser
def test_figures_stand_inline_and_cannot_touch_each_other_or_the_page(opened: Opener) -> None:
    tab = opened()
    assert tab.locator("#figures figure").count() == 3 and tab.title() == "A page <b>"
    assert tab.locator("#figures rect").count() == 2
    fill = "(r) => getComputedStyle(r).fill"
    assert tab.locator("#figures rect").first.evaluate(fill) == "rgb(18, 171, 52)"
    assert tab.locator("h1").evaluate(fill) != "rgb(18, 171, 52)"
    assert (
        "cannot read" in tab.locator("#figures").inner_text()
        and "It <i>grows</i>." in tab.locator("#figures").inner_text()
    )
    assert "gone.svg" in tab.locator(".problem").first.inner_text()


@pytest.mark.browser
def test_dark_and_light_follow_the_system_or_the_reader_and_reach_the_charts(opened: Opener) -> None:
    tab = opened(color_scheme="dark")
    charts(tab)
    back = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('.plot').layout.font.color"
    assert tab.evaluate(back) == "rgb(20, 24, 31)" and tab.evaluate(ink) == "#e6e9ef"
    tab.locator("#theme").select_option("light")
    assert tab.evaluate(back) == "rgb(255, 255, 255)" and tab.evaluate(ink) == "#1d2330"
    tab.locator("#theme").select_option("")
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate(back) == "rgb(255, 255, 255)"


@pytest.mark.browser
def test_in_print_the_page_is_light_all_charts_are_drawn_and_controls_are_gone(opened: Opener) -> None:
    tab = opened(color_scheme="dark")
    tab.wait_for_selector("html[data-plotly]", state="attached")
    tab.emulate_media(media="print")
    for number in range(4):
        tab.locator(".plot").nth(number).locator(".main-svg").first.wait_for()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("document.querySelector('.plot').layout.font.color") == "#1d2330"
    assert not tab.locator("#theme").is_visible() and not tab.locator(".exports").first.is_visible()
    assert len(tab.pdf(format="A4")) > 20_000


@pytest.mark.browser
def test_a_narrow_screen_scrolls_tables_not_the_page(opened: Opener) -> None:
    tab = opened(width=360)
    charts(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.locator(".plot").first.bounding_box()["width"] <= 360


@pytest.mark.browser
def test_a_sweep_of_which_nothing_ran_gives_a_page(opened: Opener, tmp_path: Path) -> None:
    runs = [{"folder": "runs/a", "row": "FedEve", "column": "somewhere", "seed": 1, "config": {}}]
    write_sweep(tmp_path, runs)
    tab = opened(write(tmp_path, tmp_path / "r.html"))
    assert "not run" in tab.locator("table").first.inner_text() and tab.locator(".curves").count() == 0


@pytest.mark.browser
def test_data_without_a_test_set_gives_a_page_of_facts(opened: Opener, tmp_path: Path) -> None:
    from small_sweep import tiny

    from fedeve import FederatedData

    digits = datasets.load("digits", num_clients=30)
    clients = [digits.rows(k) for k in range(30)]
    data = FederatedData.from_arrays(digits.x, digits.y, clients)
    simulate(tiny(data, method="fedeve", seed=1, rounds=4), out=tmp_path / "run")
    tab = opened(write(tmp_path, tmp_path / "r.html"))
    assert tab.locator(".reach").count() == 0
    assert charts(tab).count() == 2  # gain and both drifts
