"""Write a log of clicks, purchases in separate files, and a spec that aggregates the purchases.

    python examples/purchases.py RAW

A user who bought something in the last two days clicks more often. RAW/next is the following day.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

DAYS = 10
ROWS_A_DAY = 5000
USERS = 1000
SECONDS = 86_400  # per day
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

# Times are seconds since BEGIN until they are written.
at = np.sort(random.integers(0, (DAYS + 1) * SECONDS, 4 * USERS))
bought = pd.DataFrame({"at": at, "user_id": random.integers(0, USERS, len(at))})
bought["amount"] = random.lognormal(3, 1, len(at)).round(2)
purchases = pd.DataFrame({"bought": bought["at"], "user": bought["user_id"]})

for day in range(DAYS + 1):
    time = day * SECONDS + np.sort(random.integers(0, SECONDS, ROWS_A_DAY))
    log = pd.DataFrame({"time": time, "user": random.integers(0, USERS, ROWS_A_DAY)})
    log["item"] = random.integers(0, 100, ROWS_A_DAY)
    # The newest purchase of each row's user; before the first one NaN, which compares as False.
    newest = pd.merge_asof(log, purchases, left_on="time", right_on="bought", by="user")["bought"]
    chance = np.where(time - newest < 2 * SECONDS, 0.6, 0.2)
    log["clicked"] = (random.random(ROWS_A_DAY) < chance).astype(int)
    log["time"] = BEGIN + pd.to_timedelta(log["time"], unit="s")
    file = folder / f"day_{day}.csv" if day < DAYS else folder / "next" / f"day_{day}.csv"
    log.to_csv(file, index=False)

bought["at"] = BEGIN + pd.to_timedelta(bought["at"], unit="s")
is_next = at >= DAYS * SECONDS
bought[~is_next].to_csv(folder / "purchases.csv", index=False)
bought[is_next].to_csv(folder / "next/purchases_10.csv", index=False)
