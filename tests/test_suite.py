"""The meter of the suite: budgets, and what is kept of a run."""

import pathlib

import meter


def test_a_file_over_its_budget_is_told():
    files = {"test_a.py": 5, "test_b.py": 6, "test_c.py": 7}
    told = ["test_b.py compiled 6 programs; its budget is 5", "test_c.py compiled 7 programs; its budget is 3"]
    assert meter.over(files, {"test_c.py": 3}, 5) == told
    assert meter.over(files, {}, 7) == []


def test_every_budget_is_of_a_file_and_not_needlessly_there():
    files = {path.name for path in pathlib.Path(__file__).parent.rglob("test_*.py")}
    assert meter.BUDGETS.keys() <= files
    assert all(budget > meter.BUDGET for budget in meter.BUDGETS.values())


def test_what_is_compiled_is_kept_in_an_environment_of_the_checkout(tmp_path):
    environment = tmp_path / ".venv"
    environment.mkdir()
    assert meter.kept_cache(environment, tmp_path) is None
    (environment / "pyvenv.cfg").touch()
    assert meter.kept_cache(environment, tmp_path.parent) is None
    program = meter.kept_cache(environment, tmp_path) / "program"
    program.write_bytes(bytes(10))
    assert meter.kept_cache(environment, tmp_path, most=10) == program.parent
    assert program.exists()
    assert meter.kept_cache(environment, tmp_path, most=9) == program.parent
    assert not program.exists()
