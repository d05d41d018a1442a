"""7. Tune: leave decisions of your own schedule open, let measurements decide, and use what they found.

Run me:  python tutorials/07_tuning.py
"""

import tempfile
from pathlib import Path

import numpy as np

import tcomp
from tcomp import te
from tcomp.schedules.knobs import Knobs

# An operator of one's own: the largest of three neighbours, down the columns and then across the rows (a dilation of an image).
H, W = 700, 900
image = te.placeholder((H + 2, W + 2), name="image")
p, q = te.reduce_axis(3, name="p"), te.reduce_axis(3, name="q")
down = te.compute((H, W + 2), lambda y, x: te.max(image[y + p, x], axis=p), name="down")
grown = te.compute((H, W), lambda y, x: te.max(down[y, x + q], axis=q), name="grown")


# 1. A schedule that asks. `knobs` answers with the default, unless a tuner or a record knows better; what is asked may depend on earlier
#    answers. The function *is* the space that is searched: 3 + 3 * 3 * 2 * 2 = 39 schedules here.
def schedule(s: tcomp.Schedule, knobs: Knobs) -> None:
    rows = knobs.choice("rows", (0, 4, 16, 64), 0)  # of a band that is computed at once; 0: the whole image, stage by stage
    lanes = knobs.choice("lanes", (8, 16, 32), 8)
    if rows:
        bands, row = s.split("grown.y", rows)
        s.compute_at("down", bands if knobs.flag("whole_bands", False) else row)
        if knobs.flag("threads", True):
            s.parallel(bands)
    for stage in ("down.init", "down", "grown.init", "grown"):
        s.vectorize(s.split(f"{stage}.x", lanes, tail="mask")[1])


# 2. A dozen candidates, which takes some seconds (or say `budget=30`, in seconds). They are built and run in processes of their own, compared
#    with the default schedule's results, and entered in a database: what crashes, hangs or computes something else is a record, too. In the
#    end the winner runs against the default again, in a fresh process, and must win there.
with tempfile.TemporaryDirectory() as folder:
    database = Path(folder) / "tune.db"
    result = tcomp.tune([image, grown], schedule=schedule, trials=12, database=database)
    print(result)

    # 3. The database is a file to look into (in a shell: tcomp db show tune.db; tcomp report tune.db -o report.html), to merge with
    #    others', and to go on from: `resume=True` spends what is left of a budget, or a further one.
    from tcomp.autotune.database.store import Database

    with Database(database) as entries:
        (task,) = entries.tasks()
        for record in sorted(entries.records(task.key), key=lambda r: r.cost or 1.0)[:5]:
            print(f"  {1e3 * record.cost:.3f} ms  {record.decisions}" if record.cost else f"  {record.measurement.status}")

# 4. The winner is a schedule like any other: its steps print as Python, and it compiles.
print(result.schedule.trace)
x, y = np.random.default_rng(0).random((H + 2, W + 2), np.float32), np.zeros((H, W), np.float32)
tcomp.build(result.schedule)(x, y)
windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3))

# 5. A model's kernels are tuned likewise, all with the schedules that tcomp chooses from by itself:
#        tcomp tune model.onnx --budget 10m
#    and for a GPU, where there is one of that architecture (the same records, of another target):
#        tcomp tune model.onnx --target cuda --arch sm_90a --budget 10m
#        tcomp compile model.onnx --database tune.db
print("The right result:", np.array_equal(y, windows.max((2, 3))))
