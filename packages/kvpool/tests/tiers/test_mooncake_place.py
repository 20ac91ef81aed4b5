"""Where a cluster of Mooncake is; its store is tested with the real one, in `integrations`."""

import pytest

from pagewood.kvpool.integrations.mooncake import MooncakePlace


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://", "must be mooncake://HOST:PORT"),
        ("mooncake://h:x", "must be mooncake://HOST:PORT"),
        ("mooncake://h/1", "must be mooncake://HOST:PORT"),
        ("mooncake://me:secret@h", "a mooncake URL must have no password"),
        ("mooncake://h?user=a", "may have each of devices, host, metadata, protocol, timeout_s once"),
        ("mooncake://h?host=a&host=b", "may have each of"),
        ("mooncake://h?timeout_s=0", "timeout_s of a mooncake URL must be > 0 and finite, got '0'"),
        ("mooncake://h?protocol=udp", "protocol of a mooncake URL must be tcp or rdma, got 'udp'"),
        ("mooncake://h?devices=mlx5_0", "devices of a mooncake URL must come with protocol=rdma"),
    ],
)
def test_a_wrong_url_is_an_error(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        MooncakePlace.parse(url)
    assert "secret" not in str(caught.value)


def test_a_url_names_a_place() -> None:
    text = "mooncake://m:5?host=h&protocol=rdma&devices=a,b&metadata=http://x&timeout_s=7.5"
    expected = MooncakePlace(
        master="m", port=5, host="h", protocol="rdma", devices="a,b", metadata="http://x", timeout_s=7.5
    )
    assert MooncakePlace.parse(text) == expected
    assert (str(expected), MooncakePlace.parse("mooncake://m")) == ("mooncake://m:5", MooncakePlace(master="m"))
