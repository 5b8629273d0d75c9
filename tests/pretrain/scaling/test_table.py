import json

import numpy as np
import pytest

from pretrain.errors import ConfigError
from pretrain.scaling.columns import numbers, points_of, where
from pretrain.scaling.table import read_table, write_table

ROWS = [
    {"name": "a", "params": 1e6, "tokens": 1e8, "loss": 3.5},
    {"name": "b", "params": 2e6, "tokens": 2e8, "loss": 3.1},
    {"name": "c", "params": 4e6, "tokens": 4e8, "loss": None},
]


@pytest.fixture(params=["csv", "jsonl", "parquet"])
def table(request, tmp_path):
    path = tmp_path / f"runs.{request.param}"
    write_table(path, ROWS)
    return read_table(path)


def test_every_format_reads_back_as_written(table):
    np.testing.assert_array_equal(table.numbers("params"), [1e6, 2e6, 4e6])
    assert np.isnan(table.numbers("loss")[2])
    assert table.column("name").tolist() == ["a", "b", "c"]


def test_a_row_that_is_no_number_is_refused_by_line(table):  # G48
    with pytest.raises(
        ConfigError, match=rf"'loss' .loss. has 1 values that are no positive number: line {table.lines[2]}"
    ):
        points_of(table, "params", "tokens", "loss")


def test_where_chooses_rows(table):
    assert where(table, "loss > 0").tolist() == [True, True, False]
    assert where(table, "params >= 2e6 and not name == 'c'").tolist() == [False, True, False]
    assert where(table, "1e6 < params < 3e6 or name == 'c'").tolist() == [False, True, True]
    assert where(table, "not largest(params, 2)").tolist() == [True, False, False]
    assert where(table, "smallest(tokens / params, 1)").tolist() == [True, False, False]
    assert where(table, "abs(log10(params) - 6) < 0.1").tolist() == [True, False, False]
    assert where(table, "isnan(loss)").tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os')", "is not allowed"),
        ("params.dtype", "is not allowed"),
        ("[1, 2]", "is not allowed"),
        ("params * 2", "gives numbers, not true or false"),
        ("loss <", "not an expression"),
        ("los < 3", "no column 'los'; did you mean 'loss'"),
    ],
)
def test_where_refuses_what_is_no_choice_of_rows(table, expression, message):
    with pytest.raises(ConfigError, match=message):
        where(table, expression)


def test_counts_in_another_unit_are_asked_for_not_guessed(tmp_path):
    path = tmp_path / "runs.csv"
    write_table(path, [{"N": 7.0, "D": 1.4e12, "L": 2.0}, {"N": 70.0, "D": 1.4e12, "L": 1.9}])
    with pytest.raises(ConfigError, match=r"at most 70 params, which looks like another unit; say --params-unit 1e6"):
        points_of(read_table(path), "N", "D", "L")
    points = points_of(read_table(path), "N", "D", "L", units={"params": 1e9})
    assert points.params.tolist() == [7e9, 70e9]


def test_text_in_a_column_of_numbers_is_named(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("params,tokens,loss\n1e6,1e8,3.5\n2e6,20M,3.1\n")
    with pytest.raises(ConfigError, match="line 3: column 'tokens' holds '20M', which is no number; write numbers as"):
        points_of(read_table(path), "params", "tokens", "loss")
    with pytest.raises(ConfigError, match=r"'tokens / 2' mixes numbers with the text in tokens"):
        numbers(read_table(path), "tokens / 2")


def test_tables_of_others_may_be_separated_otherwise_and_mark_what_is_missing(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("N (no embed);C;ppl;note\n1e6;6e14;33.1;ok\n2e6;n/a;22.2;\n4e6;NA;20.1;-\n")
    table = read_table(path)
    assert numbers(table, "C / (6 * col('N (no embed)'))")[0] == 1e8
    assert np.isnan(numbers(table, "C")[1:]).all()
    assert numbers(table, "log(ppl)")[1] == np.log(22.2)
    with pytest.raises(ConfigError, match=r"'ppl' .loss. goes up to 33.1, more than 20 nats .* say --loss 'log.ppl.'"):
        points_of(table, "N (no embed)", "1e8 + 0 * ppl", "ppl")
    with pytest.raises(ConfigError, match=r"no column 'tokens'. It has N"):
        numbers(table, "tokens")
    path.write_text("N,D,N\n1,2,3\n")
    with pytest.raises(ConfigError, match="two columns are named 'N'"):
        read_table(path)


def test_a_short_row_and_a_missing_file_are_named(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("params,tokens,loss\n1e6,1e8\n")
    with pytest.raises(ConfigError, match="line 2: the header has 3 cells"):
        read_table(path)
    with pytest.raises(ConfigError, match="no such table"):
        read_table(tmp_path / "other.csv")
    for name, content in (("a.csv", b"\xff\xfe\x00"), ("a.jsonl", b"{"), ("a.parquet", b"PAR?")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name}: cannot be read as a table"):
            read_table(tmp_path / name)
    with pytest.raises(ConfigError, match=r"runs.xlsx: tables are written as .csv, .jsonl or .parquet"):
        write_table(tmp_path / "runs.xlsx", ROWS)


def test_a_list_of_objects_is_a_table_too(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(ROWS))
    assert len(read_table(path)) == 3
