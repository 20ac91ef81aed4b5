"""Images through a server of processes, in every protocol, with a tiny model of random weights."""

# pyright: basic
# Pillow and the clients' answers are typed in part only.

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import Image as Picture

from pictured import Pictured, pictured, pictures
from serving import Server, until

MODEL = "seeing"
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def model() -> Pictured:
    return pictured("qwen2.5")


@pytest.fixture(scope="module")
def server(model: Pictured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--model", str(model.folder), "--served-model-name", MODEL, "--max-total-tokens", "2000")
    server = Server(
        tmp_path_factory.mktemp("images"),
        *options,
        "--page-size",
        "4",
        "--max-images",
        "3",
        "--max-image-pixels",
        "5000",
    )
    until(lambda: server.ready()["status"] == "ready")
    yield server
    server.close()


def png(picture: Picture) -> str:
    file = BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(picture: Picture) -> str:
    return f"data:image/png;base64,{png(picture)}"


def chat(*parts: str | Picture, **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {
        "model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6,
        "ignore_eos": True, **fields,
    }  # fmt: skip


def asked(server: Server, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_protocol_shows_the_model_the_same(server: Server, model: Pictured) -> None:
    (picture,) = pictures(1, seed=20)
    image = model.image(picture)
    num_image = model.recipe.num_tokens(image.height, image.width)
    plain = asked(server, chat("w5 w6"))
    first = asked(server, chat(picture, " w5 w6"))
    text = first["choices"][0]["message"]["content"]
    assert first["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + num_image + 2
    limits = {"temperature": 0, "max_output_tokens": 6, "ignore_eos": True}
    parts = [{"type": "input_image", "image_url": url(picture)}, {"type": "input_text", "text": " w5 w6"}]
    response = asked(server, {"model": MODEL, "input": [{"role": "user", "content": parts}], **limits}, "/v1/responses")
    assert response["output"][-1]["content"][0]["text"] == text
    source = {"type": "base64", "media_type": "image/png", "data": png(picture)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": " w5 w6"}]
    messages = [{"role": "user", "content": blocks}]
    message = asked(server, {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}, "/v1/messages")
    assert text.startswith(message["content"][0]["text"])
    assert (
        message["usage"]["input_tokens"] + message["usage"].get("cache_read_input_tokens", 0)
        == (first["usage"]["prompt_tokens"])
    )
    counted = asked(server, {"model": MODEL, "messages": messages}, "/v1/messages/count_tokens")
    assert counted["input_tokens"] == first["usage"]["prompt_tokens"]
    options = {"temperature": 0, "num_predict": 6}
    said = {"role": "user", "content": " w5 w6", "images": [png(picture)]}
    ollama = asked(server, {"model": MODEL, "messages": [said], "stream": False, "options": options}, "/api/chat")
    assert text.startswith(ollama["message"]["content"])
    assert ollama["prompt_eval_count"] == first["usage"]["prompt_tokens"]
    body = {"model": MODEL, "prompt": " w5 w6", "images": [png(picture)], "stream": False, "options": options}
    assert text.startswith(asked(server, body, "/api/generate")["response"])
    assert asked(server, {"model": MODEL}, "/api/show")["capabilities"][-1] == "vision"


def test_a_conversation_finds_its_images_in_the_cache(server: Server) -> None:
    one, other, third = pictures(3, seed=21)
    body = chat(one, " w7 ", other)
    first = asked(server, body)
    again = asked(server, body)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 9
    earlier = [*body["messages"], {"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    more = asked(server, body | {"messages": [*earlier, *chat("w8 ", third)["messages"]]})
    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 9
    swapped = asked(server, chat(other, " w7 ", one))
    assert swapped["usage"]["prompt_tokens_details"]["cached_tokens"] < 4
    assert swapped["choices"] != first["choices"]


def test_requests_are_sent_again_with_their_images(server: Server) -> None:
    (picture,) = pictures(1, seed=22)
    body = chat(picture, " w9", max_tokens=40)
    whole = asked(server, body)["choices"]
    for process in ("engine", "tokenizer"):
        server.admin.post("/pause", json={}).raise_for_status()
        before = server.ready()["incidents"]["retried"]
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda found=found: found.append(asked(server, body)))
        thread.start()
        until(lambda: server.ready()["engine"]["num_waiting"] == 1)
        server.lose(process)
        until(lambda: server.ready()["status"] == "ready")
        server.admin.post("/resume", json={}).raise_for_status()
        thread.join(150)
        assert [one["choices"] for one in found] == [whole]
        if process == "engine":
            assert server.ready()["incidents"]["retried"] == before + 1


def test_what_is_wrong_about_an_image_is_said(server: Server) -> None:
    (picture,) = pictures(1, seed=23)
    large = picture.resize((100, 51))
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    for body, words in (
        (chat(*[picture] * 4), "at most 3 images"),
        (chat(large), "at most 5000 pixels"),
        (chat(picture, "w3 <image>"), "once for each of 1 images"),
        ({**chat("w3"), "messages": [{"role": "user", "content": [part]}]}, "must be of the format"),
        (_with_url("data:image/png;base64,%%"), "base64"),
        (_with_url("https://example.com/a.png"), "the server fetches no images"),
        (_with_url("file:///etc/passwd"), "data URL"),
        (
            {**chat("w3"), "messages": [{"role": "system", "content": chat(picture)["messages"][0]["content"]}]},
            "'user'",
        ),
        (chat(picture, prompt_logprobs=1), "prompt_logprobs"),
    ):
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, (words, answer.text)
        assert words in answer.json()["error"]["message"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_chat_page_shows_the_model_pictures(server: Server, tmp_path: Path) -> None:
    """Attached by the button, taken away again, sent before the text, and shown in the conversation."""
    api: Any = pytest.importorskip("playwright.sync_api")
    one, other = pictures(2, seed=24)
    for name, picture in (("one.png", one), ("other.png", other)):
        picture.save(tmp_path / name, "PNG")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(base_url=server.url)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto("/")
        page.get_by_role("button", name="Attach pictures").wait_for()
        page.locator("#files").set_input_files([tmp_path / "one.png", tmp_path / "other.png"])
        page.locator("#shots img").nth(1).wait_for()
        page.locator("#shots button").nth(1).click()
        page.get_by_label("Message").fill("w5 w6")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("6")
        page.get_by_role("button", name="Save").click()
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send").click()
        assert sent.value.post_data_json["messages"] == chat(one, "w5 w6")["messages"]
        page.get_by_text("prompt tokens cached").wait_for()
        assert page.locator("#shots img").count() == 0
        assert page.locator(".user img").get_attribute("src") == url(one)
        assert page.locator(".fault:visible").count() == 0
        browser.close()
    assert faults == []


def _with_url(address: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": address}}]
    return {**chat("w3"), "messages": [{"role": "user", "content": content}]}
