"""Settings: file < --set < flags; every mistake names the value, the place and the way out."""

import pytest

from kernelband.config import Config, load
from kernelband.errors import UserError


def test_defaults_need_no_file():
    assert load(None, [], {}) == Config()


def test_flags_win_over_set_and_set_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("budget: {pulls: 5, seconds: 9}\nseed: 1\npolicy: random\n")
    config = load(path, ["budget.pulls=6", "seed=2"], {"seed": 3, "policy": None})
    assert (config.budget.pulls, config.budget.seconds, config.seed, config.policy) == (6, 9, 3, "random")


@pytest.mark.parametrize("text, told", [
    ("bugdet: {pulls: 5}", "budget"),
    ("budget: {pull: 5}", "budget.pulls"),
    ("budget: 5", "must hold settings"),
    ("- 1", "mapping"),
    ("budget: {pulls: [", "not valid YAML"),
    ("budget: {pulls: 0}", "budget.pulls"),
    ("budget: {pulls: many}", "many"),
    ("seed: -1", "seed"),
    ("writers: [tunr]", "'rewriter' or 'tuner'"),
    ("writers: []", "writers"),
    ("writers: tuner", "list"),
    ("writers: [tuner, tuner]", "each writer once"),
])
def test_a_bad_file_is_named_with_the_nearest_setting(tmp_path, text, told):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        load(path, [], {})


def test_writers_are_named_in_the_order_in_which_they_are_asked():
    assert load(None, [], {}).writers == ["rewriter"]
    assert load(None, ["writers=[tuner, rewriter]"], {}).writers == ["tuner", "rewriter"]


@pytest.mark.parametrize("item, told", [
    ("budget.pulls", "name=value"), ("=3", "name=value"), ("budget.plls=3", "budget.pulls"), ("x=[", "not valid YAML"),
    ("budget.pulls=0", "pulls"), ("budget=3", "unknown setting"),
])
def test_a_bad_set_is_named(item, told):
    with pytest.raises(UserError, match=told):
        load(None, [item], {})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml"):
        load(tmp_path / "none.yaml", [], {})
