"""Events of a traced run: capacity and count, then (number of the call or -1, thread, start, end) of each, all i64.

The entry function records calls of kernels, the thread pool chunks of parallel loops; times are ticks of the processor's counter.
"""

EVENT_IR = """\
define internal void @tcomp_event(ptr %events, i64 %what, i64 %thread, i64 %start, i64 %end) noinline {
entry:
  %none = icmp eq ptr %events, null
  br i1 %none, label %done, label %claim
claim:
  %count.at = getelementptr i64, ptr %events, i64 1
  %n = atomicrmw add ptr %count.at, i64 1 monotonic
  %capacity = load i64, ptr %events
  %room = icmp slt i64 %n, %capacity
  br i1 %room, label %record, label %done
record:
  %four = shl i64 %n, 2
  %at0 = add i64 %four, 2
  %at1 = add i64 %four, 3
  %at2 = add i64 %four, 4
  %at3 = add i64 %four, 5
  %place0 = getelementptr i64, ptr %events, i64 %at0
  store i64 %what, ptr %place0
  %place1 = getelementptr i64, ptr %events, i64 %at1
  store i64 %thread, ptr %place1
  %place2 = getelementptr i64, ptr %events, i64 %at2
  store i64 %start, ptr %place2
  %place3 = getelementptr i64, ptr %events, i64 %at3
  store i64 %end, ptr %place3
  br label %done
done:
  ret void
}
"""
