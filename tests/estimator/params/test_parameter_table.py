from sparkdl.estimator.params.spec import PAGE, SPECS, render


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m sparkdl.estimator.params.spec"


def test_every_parameter_says_default_unit_effect_and_peer():
    for spec in SPECS:
        assert spec.effect.endswith("."), spec.name
        assert spec.unit, spec.name
        assert f"| `{spec.name}` | `{spec.default!r}` |" in render()
