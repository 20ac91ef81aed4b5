"""The pages in a real browser: Debian's Chromium, driven by Playwright; skipped where either is missing."""

from __future__ import annotations

import asyncio
import importlib
import random
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import ADMIN_KEY, MemoryServer
from pagewood.engine.text import Tokenizer
from scripted import Script, listening, paced, scripted_server

pytest.importorskip("playwright")
CHROMIUM = shutil.which("chromium")

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@asynccontextmanager
async def browsing(server: MemoryServer, *, ignored: str | None = None, **options: Any) -> AsyncGenerator[Any]:
    """Yield a page of a browser, at the address of a server; in the end it must have logged nothing.

    Args:
        server: is started.
        ignored: in messages of the browser that are expected.
        options: of the browser's context.
    """
    async_playwright: Any = importlib.import_module("playwright.async_api").async_playwright

    problems: list[str] = []

    def note(problem: Any) -> None:
        if ignored is None or ignored not in str(problem):
            problems.append(str(problem))

    async with listening(server) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(**{"base_url": url, "viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(15_000)
        page = await context.new_page()
        page.on("console", note)  # our pages log nothing
        page.on("pageerror", note)
        yield page
        await browser.close()
        await server.until(lambda: server.service.watchers.num_watching == 0)
    assert problems == []


@asynccontextmanager
async def load(server: MemoryServer, *, num_clients: int = 12) -> AsyncGenerator[None]:
    """Keep a server under load, at about 40 steps a second, with shared prefixes, tenants and deadlines."""
    rng = random.Random(1)
    stems = ["You are a helpful assistant of the wood shop. Answer briefly, in plain words. " * 2, "Summarise: "]

    async def client(number: int) -> None:
        while True:
            body = {
                "text": rng.choice(stems) + f"customer {rng.randrange(12)} asks for shelf {rng.randrange(6)}",
                "rid": f"{('tea', 'oak')[number % 2]}-{number}-{rng.randrange(10**6)}",
                "sampling_params": {"max_new_tokens": rng.randrange(40, 160), "ignore_eos": True},
                "cache_salt": (None, "acme", "birch")[number % 3],
                "deadline": 60 if number % 4 == 0 else None,
                "priority": number % 3,
            }
            await server.client.post("/generate", json=body)

    async with paced(server):
        clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
        try:
            yield
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


@pytest.fixture
async def busy(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server with room for the load."""
    async with MemoryServer(model_folder, tokenizer, limit=64, num_pages=400, dashboard_text=True) as server:
        yield server
        await server.until_idle()


async def until(page: Any, holds: str) -> None:
    """Wait until an expression of the page is true; the policy of the pages allows no `wait_for_function`."""
    for _ in range(300):
        if await page.evaluate(holds):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"timed out: {holds}")


async def ink(page: Any, canvas: str) -> int:
    """Return how many colours a canvas shows."""
    return await page.evaluate(
        """(id) => { const one = document.getElementById(id);
            const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
            return new Set(new Uint32Array(data.buffer)).size; }""",
        canvas,
    )


async def test_the_dashboard_follows_load_and_a_request_is_found_explained_and_aborted(busy: MemoryServer) -> None:
    async with browsing(busy) as page, load(busy):
        await page.goto(f"/dashboard#key={ADMIN_KEY}")
        await page.get_by_text("Serving").wait_for()
        await page.locator("#rows tr").nth(9).wait_for()
        await until(page, "live.rates && live.rates.output_tokens > 10")
        first = await page.locator("#figures .figure:nth-child(1) b").text_content()
        assert first.startswith("8")
        for canvas in ("steps", "pages", "branches"):
            assert await ink(page, canvas) > 3, canvas
        # Found: by the keyboard only.
        await page.locator("body").press("/")
        await page.keyboard.type("tea-")
        names = await page.locator("#rows .id").all_text_contents()
        assert names
        assert all(name.startswith("tea-") for name in names)
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        # Explained.
        name = await page.locator("#d-id").text_content()
        assert name.startswith("tea-")
        explained = await page.locator("#d-explain").text_content()
        assert "is running" in explained or "waiting for" in explained
        assert "prompt tokens" in explained or "Nothing of it" in explained
        # Aborted: its client gets the error.
        [group] = {one.group for one in busy.service.live._live.values() if name in one.group.names}  # pyright: ignore[reportPrivateUsage]
        await page.get_by_role("button", name="Abort request").click()
        assert group.open_ids
        await page.get_by_role("button", name="Abort it now").click()
        await page.get_by_text("Aborted.").wait_for()
        await page.get_by_text("It has ended").wait_for()
        assert not group.open_ids
        await page.keyboard.press("Escape")
        assert not await page.locator("#detail").is_visible()


@pytest.mark.slow
async def test_the_tree_zooms_and_freezing_holds_the_display(busy: MemoryServer) -> None:
    async with browsing(busy, color_scheme="dark", viewport={"width": 390, "height": 800}) as page, load(busy):
        await page.goto(f"/dashboard#key={ADMIN_KEY}")
        await page.locator("#rows tr").nth(5).wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.emulate_media(color_scheme="light")
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark, light) == ("rgb(19, 22, 24)", "rgb(246, 245, 241)")
        await page.locator("#branches").focus()
        await page.keyboard.press("ArrowDown")
        await page.get_by_text("Tokens 0 to").wait_for()
        assert "wood shop" in await page.locator("#branch").text_content()
        await page.keyboard.press("Enter")
        await page.get_by_text("zoomed in").wait_for()
        await page.keyboard.press("Escape")
        await page.get_by_text("zoomed in").wait_for(state="detached")
        await page.locator("#freeze").click()
        held = await page.evaluate("live.data.number")
        await asyncio.sleep(0.6)
        assert await page.evaluate("live.data.number") == held
        await page.locator("#freeze").click()
        await until(page, f"live.data.number > {held}")


async def test_the_embedded_model_offers_example_questions(tmp_path: Path) -> None:
    write_echo_folder(tmp_path)
    script = Script()
    script.answer = "nineteen"
    async with scripted_server(tmp_path, script, model_name="pagewood-demo") as server, browsing(server) as page:
        await page.goto("/")
        examples = page.locator(".examples button")
        await examples.first.wait_for()
        assert await examples.count() == 5
        asked = await examples.first.text_content()
        await examples.first.click()
        await page.get_by_text("nineteen").wait_for()
        assert await page.locator(".user").text_content() == asked
        assert await examples.count() == 0
        await page.get_by_role("button", name="New").click()
        assert await examples.count() == 5
    async with scripted_server(tmp_path, script) as server, browsing(server) as page:
        await page.goto("/")
        await page.get_by_text("Models make mistakes").wait_for()
        assert await examples_of(page) == 0


async def examples_of(page: Any) -> int:
    return await page.locator(".examples button").count()


async def test_a_chat_streams_stops_and_counts(tmp_path: Path) -> None:
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template="hermes")
    script = Script()
    script.answer = "<think>\nHm.\n</think>\n\nIt is <b>19</b>.<img src=x onerror=alert(1)>"
    async with scripted_server(tmp_path, script) as server, browsing(server) as page:
        await page.goto("/")
        await page.get_by_text("echo answers from this server.").wait_for()
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_role("button", name="Save").click()
        await page.get_by_label("Message").fill("What is 12 + 7?")
        await page.keyboard.press("Enter")
        await page.get_by_text("prompt tokens cached").wait_for()
        # What the model writes is text.
        assert await page.locator(".answer > .text").text_content() == "It is <b>19</b>.<img src=x onerror=alert(1)>"
        assert await page.locator(".answer b, .answer img").count() == 0
        assert await page.locator(".answer details .text").text_content() == "Hm."
        assert "Be brief." in script.prompts[-1]
        meta = await page.locator(".answer .meta").text_content()
        assert "tokens/s" in meta
        # The second turn finds the first one in the cache, and can be stopped.
        script.answer = "long " * 200
        async with paced(server):
            await page.get_by_label("Message").fill("And now?")
            await page.keyboard.press("Enter")
            await page.get_by_text("long long").wait_for()
            await page.get_by_role("button", name="Stop").click()
            await page.get_by_text("stopped").wait_for()
        await server.until(lambda: not server.service.live.num_live)
        assert "19</b>" in script.prompts[-1]
        # Calls are shown, and the user writes their results.
        tool = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
        await page.get_by_role("button", name="Settings").click()
        await page.locator("#tools").fill("{")
        await page.get_by_role("button", name="Save").click()
        assert "must be a JSON array" in await page.locator("#setfault").text_content()
        await page.locator("#tools").fill(tool)
        await page.get_by_role("button", name="Save").click()
        script.answer = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        await page.get_by_label("Message").fill("Is it cold?")
        await page.keyboard.press("Enter")
        await page.get_by_label("Result of weather").fill("wet and mild")
        assert '"city": "Oslo"' in await page.locator(".call pre").text_content()
        script.answer = "It is mild."
        await page.get_by_role("button", name="Give result").click()
        await page.get_by_text("It is mild.").wait_for()
        assert "wet and mild" in script.prompts[-1]


async def test_programs_do_not_get_pages_and_pages_allow_only_their_own_code(server: MemoryServer) -> None:
    for path in ("/", "/dashboard"):
        response = await server.client.get(path, headers={"accept": "text/html"})
        policy = response.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.count("'sha256-") == 2
        assert "innerHTML" not in response.text
    assert (await server.client.get("/")).headers["content-type"].startswith("text/plain")


async def test_the_dashboard_asks_for_a_key_keeps_it_and_sends_it(server: MemoryServer) -> None:
    async with browsing(server, ignored="403") as page:
        await page.goto("/dashboard")
        await page.get_by_role("heading", name="Admin key").wait_for()
        port = page.url.partition(":")[2].partition(":")[2].partition("/")[0]
        place = f"cat ~/.cache/pagewood/run/$(hostname)/127.0.0.1-{port}.key"
        assert await page.locator("#place").text_content() == place
        assert await page.locator("#keynote").text_content() == ""
        await page.keyboard.type("sesame")
        await page.keyboard.press("Enter")
        await page.get_by_text("This is not an admin key of this server.").wait_for()
        await page.keyboard.type(ADMIN_KEY)
        await page.keyboard.press("Enter")
        await page.get_by_text("Serving").wait_for()
        await page.reload()
        await page.get_by_text("Serving").wait_for()
        assert not await page.locator("#ask").is_visible()


async def test_a_link_brings_the_key_in_its_fragment(server: MemoryServer) -> None:
    async with browsing(server, ignored="403") as page:
        asked: list[str] = []

        def note(request: Any) -> None:
            asked.append(request.url)

        page.on("request", note)
        await page.goto(f"/dashboard#key={ADMIN_KEY}")
        await page.get_by_text("Serving").wait_for()
        assert page.url.endswith("/dashboard")
        await page.evaluate("sessionStorage.clear()")
        await page.goto("/dashboard")
        await page.get_by_role("heading", name="Admin key").wait_for()
        await page.goto(f"/dashboard#key={ADMIN_KEY}")  # of the page that is open, so that nothing is loaded by itself
        await page.get_by_text("Serving").wait_for()
        assert page.url.endswith("/dashboard")
        assert not any(ADMIN_KEY in url for url in asked)
