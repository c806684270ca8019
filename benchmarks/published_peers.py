"""Train another program on the parquet files of the splits, and print its metrics on test.

The penalty or the number of trees is chosen on valid. Ids are categories; of a list of ids, the
trees use the first, the regression all. This program imports nothing of ours.
"""

import argparse
import json
import pathlib

import numpy as np
import pyarrow.parquet as pq
from scipy import sparse

#: The values of the regression's C, from strong penalties to weak ones.
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
MAX_TREES = 2000
#: Boosting stops after this many trees without an improvement on valid.
TREES_WITHOUT_GAIN = 50


class Rows:
    """The rows of a part: labels, numbers [rows, dense], and ids of each categorical column."""

    def __init__(self, split: pathlib.Path, part: str, columns: dict) -> None:
        table = pq.read_table(split / part)
        self.labels = table[columns["label"]].to_numpy()
        numbers = [table[name].to_numpy() for name in columns["dense"]]
        self.numbers = np.column_stack([np.empty((len(self.labels), 0)), *numbers])
        self.ids = {name: table[name].combine_chunks() for name in columns["categorical"]}

    def take_first_ids(self) -> np.ndarray:
        """Return the first id of each column, int32 [rows, columns]; 0 for an empty list."""
        columns = []
        for ids in self.ids.values():
            if hasattr(ids, "offsets"):
                begin = np.asarray(ids.offsets[:-1])
                end = np.asarray(ids.offsets[1:])
                values = np.append(np.asarray(ids.values), 0)
                ids = np.where(begin < end, values[begin], 0)
            columns.append(np.asarray(ids, dtype=np.int32))
        return np.column_stack([np.empty((len(self.labels), 0), np.int32), *columns])

    def make_indicators(self, sizes: dict) -> sparse.csr_matrix:
        """Return the numbers, and a column for each id that is 1 in the rows with this id."""
        parts = [sparse.csr_matrix(self.numbers)]
        for name, ids in self.ids.items():
            row = np.arange(len(self.labels))
            if hasattr(ids, "offsets"):
                row = np.repeat(row, np.diff(np.asarray(ids.offsets)))
                ids = ids.values
            shape = len(self.labels), sizes[name]
            ones = np.ones(len(row))
            parts.append(sparse.csr_matrix((ones, (row, np.asarray(ids))), shape=shape))
        return sparse.hstack(parts, format="csr")


def run_regression(train: Rows, valid: Rows, test: Rows, sizes: dict, seed: int) -> np.ndarray:
    """Fit scikit-learn's logistic regression with each C; return the best one's probabilities."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    inputs = [rows.make_indicators(sizes) for rows in (train, valid, test)]
    best_loss = np.inf
    probabilities = None
    model = LogisticRegression(max_iter=1000, warm_start=True)
    for strength in STRENGTHS:
        model.set_params(C=strength).fit(inputs[0], train.labels)
        loss = log_loss(valid.labels, model.predict_proba(inputs[1])[:, 1])
        if loss < best_loss:
            best_loss = loss
            probabilities = model.predict_proba(inputs[2])[:, 1]
    return probabilities


def run_lightgbm(train: Rows, valid: Rows, test: Rows, sizes: dict, seed: int) -> np.ndarray:
    """Boost trees with LightGBM's defaults until valid stops improving; return probabilities."""
    import lightgbm

    inputs = []
    for rows in (train, valid, test):
        inputs.append(np.column_stack([rows.numbers, rows.take_first_ids()]))
    num_dense = train.numbers.shape[1]
    categorical = list(range(num_dense, inputs[0].shape[1]))
    data = lightgbm.Dataset(inputs[0], train.labels, categorical_feature=categorical)
    valid_data = data.create_valid(inputs[1], valid.labels)
    model = lightgbm.train(
        {"objective": "binary", "seed": seed, "verbose": -1},
        data,
        MAX_TREES,
        valid_sets=[valid_data],
        callbacks=[lightgbm.early_stopping(TREES_WITHOUT_GAIN, verbose=False)],
    )
    return model.predict(inputs[2])


def run_catboost(train: Rows, valid: Rows, test: Rows, sizes: dict, seed: int) -> np.ndarray:
    """Boost trees with CatBoost's defaults until valid stops improving; return probabilities."""
    import catboost

    has_numbers = train.numbers.shape[1] > 0
    pools = []
    for rows in (train, valid, test):
        features = catboost.FeaturesData(
            num_feature_data=rows.numbers.astype(np.float32) if has_numbers else None,
            cat_feature_data=rows.take_first_ids().astype("S").astype(object),
        )
        pools.append(catboost.Pool(features, rows.labels))
    model = catboost.CatBoostClassifier(
        iterations=MAX_TREES, random_seed=seed, verbose=False, allow_writing_files=False
    )
    model.fit(pools[0], eval_set=pools[1], early_stopping_rounds=TREES_WITHOUT_GAIN)
    return model.predict_proba(pools[2])[:, 1]


SYSTEMS = {"regression": run_regression, "lightgbm": run_lightgbm, "catboost": run_catboost}


def main() -> None:
    """Train one system with one seed, and print AUROC and log loss on test."""
    from sklearn.metrics import log_loss, roc_auc_score

    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=tuple(SYSTEMS))
    parser.add_argument("split", type=pathlib.Path)
    parser.add_argument(
        "columns", type=json.loads, help="JSON: label, dense and categorical columns, table sizes"
    )
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args()
    parts = [Rows(arguments.split, part, arguments.columns) for part in ("train", "valid", "test")]
    scores = SYSTEMS[arguments.system](*parts, arguments.columns["sizes"], arguments.seed)
    labels = parts[-1].labels
    print(
        json.dumps({"auroc": roc_auc_score(labels, scores), "log_loss": log_loss(labels, scores)})
    )


if __name__ == "__main__":
    main()
