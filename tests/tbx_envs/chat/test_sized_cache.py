import pytest

from tbx_envs.chat.sized_cache import SizedCache


def counted(cache, asked):
    """How often a result had to be made for keys that are numbers of bytes."""
    made = []
    for key in asked:
        assert cache.get(key, lambda key=key: made.append(key) or "x" * key, len) == "x" * key
    return made


def test_a_result_is_made_once_while_it_is_kept():
    assert counted(SizedCache(160), [3, 4, 3, 4]) == [3, 4]


def test_the_least_recently_used_go_when_the_bytes_do_not_fit():
    cache = SizedCache(160)
    fillers = [*range(100, 116)]
    for key in fillers:  # sixteen of ten bytes each fill it
        cache.get(key, lambda: "x" * 10, len)
    cache.get(fillers[0], lambda: pytest.fail("it was kept"), len)
    cache.get("one more", lambda: "x" * 10, len)
    assert cache.num_bytes == 160
    assert cache.get(fillers[0], lambda: "made again", len) == "x" * 10  # it was used since
    assert cache.get(fillers[1], lambda: "made again", len) == "made again"


@pytest.mark.parametrize("size", [10**2, 10**4, 10**6])
def test_what_is_kept_does_not_grow_with_what_is_asked_for(size):
    cache = SizedCache(1600)
    for number in range(50):
        cache.get((number, size), lambda: "x" * size, len)
    assert cache.num_bytes <= 1600
    assert counted(cache, [101, 101]) == [101, 101]  # more than its share: never kept
