from sparkdl.estimator.params.parameter_table import PAGE, render
from sparkdl.estimator.params.spec import SPECS


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m sparkdl.estimator.params.parameter_table"


def test_every_parameter_says_default_unit_effect_and_peer():
    for spec in SPECS:
        assert spec.effect.endswith("."), spec.name
        assert spec.unit, spec.name
        assert f"| `{spec.name}` | `{spec.default!r}` |" in render()


def test_every_parameter_is_read_by_the_code():
    source = "".join(path.read_text() for path in PAGE.parent.rglob("*.py") if path.name not in ("spec.py",))
    refused = {"mp_start_method", "data_module", "reader_pool_type", "inmemory_cache_all"}
    aliases = {"featuresCol", "labelCol", "weightCol", "validationIndicatorCol"}
    unread = [spec.name for spec in SPECS if f'"{spec.name}"' not in source and spec.name not in refused | aliases]
    assert not unread
