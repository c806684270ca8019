"""Write a log of clicks, purchases in files of their own, and a spec that sums these up.

    python examples/purchases.py RAW

A user who has bought something within two days clicks more often. RAW/next is the day after.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

DAYS, ROWS_A_DAY, USERS, SECONDS = 10, 5000, 1000, 86_400
BEGIN = pd.Timestamp("2026-10-01")
SPEC = """
input = {format = "csv"}
label = {name = "clicked"}
events = {time = "time"}
[[source]]
name = "purchases"
path = "purchases*.csv"
time = "at"
known = "10m"
key = {user = "user_id"}
[[aggregate]]
of = ["user"]
source = "purchases"
values = ["count", "sum(amount)", "last(amount)"]
window = "2d"
[[categorical]]
names = ["user", "item"]
raw = "int"
"""

folder = Path(sys.argv[1])
random = np.random.default_rng(0)
(folder / "next").mkdir(parents=True, exist_ok=True)
(folder / "spec.toml").write_text(SPEC)
at = np.sort(random.integers(0, (DAYS + 1) * SECONDS, 4 * USERS))
bought = pd.DataFrame({"at": at, "user_id": random.integers(0, USERS, len(at))})
bought["amount"] = random.lognormal(3, 1, len(at)).round(2)
known = bought.rename(columns={"at": "last", "user_id": "user"}).drop(columns="amount")
for day in range(DAYS + 1):
    time = day * SECONDS + np.sort(random.integers(0, SECONDS, ROWS_A_DAY))
    log = pd.DataFrame({"time": time, "user": random.integers(0, USERS, ROWS_A_DAY)})
    log["item"] = random.integers(0, 100, ROWS_A_DAY)
    last = pd.merge_asof(log, known, left_on="time", right_on="last", by="user")["last"]
    chance = np.where(time - last < 2 * SECONDS, 0.6, 0.2)
    log["clicked"] = (random.random(ROWS_A_DAY) < chance).astype(int)
    log["time"] = BEGIN + pd.to_timedelta(log["time"], unit="s")
    log.to_csv(folder / ("next" if day == DAYS else "") / f"day_{day}.csv", index=False)
bought["at"] = BEGIN + pd.to_timedelta(bought["at"], unit="s")
is_next = at >= DAYS * SECONDS
bought[~is_next].to_csv(folder / "purchases.csv", index=False)
bought[is_next].to_csv(folder / "next/purchases_10.csv", index=False)
