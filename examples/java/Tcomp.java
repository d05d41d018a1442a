import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.lang.foreign.ValueLayout;
import java.lang.invoke.MethodHandle;
import java.nio.file.Path;

/** libtcomp for Java, by its foreign function API (Java 22 or newer): a model, whose runs may be called by any number of threads. */
final class Tcomp implements AutoCloseable {
    private static final int MESSAGE = 512;
    private static final int INPUT = 0;
    private static final int OUTPUT = 1;
    private static final ValueLayout INT = ValueLayout.JAVA_INT;
    private static final ValueLayout LONG = ValueLayout.JAVA_LONG;
    private static final ValueLayout POINTER = ValueLayout.ADDRESS;

    /** What libtcomp refused, and why. */
    static final class Refused extends RuntimeException {
        Refused(String why) {
            super(why);
        }
    }

    private final Arena arena = Arena.ofShared();
    private final SymbolLookup library;
    private final MemorySegment model;

    /** Loads a model for so many threads (0: as it was compiled) by the library in a file. A model is native code: load only what you trust. */
    Tcomp(Path libtcomp, String path, int threads) {
        library = SymbolLookup.libraryLookup(libtcomp, arena);
        MemorySegment why = arena.allocate(MESSAGE, 1);
        MemorySegment place = arena.allocate(8, 8);
        int code = (int) call("tcomp_model_load", INT, arguments(POINTER, INT, INT, POINTER, POINTER, LONG),
                arena.allocateFrom(path), threads, 0, place, why, (long) MESSAGE);
        if (code != 0) {
            String message = why.getString(0);
            arena.close();
            throw new Refused(message);
        }
        model = place.get(ValueLayout.ADDRESS, 0);
    }

    private static MemoryLayout[] arguments(MemoryLayout... layouts) {
        return layouts;
    }

    private Object call(String name, MemoryLayout result, MemoryLayout[] arguments, Object... values) {
        FunctionDescriptor type = result == null ? FunctionDescriptor.ofVoid(arguments) : FunctionDescriptor.of(result, arguments);
        MethodHandle function = Linker.nativeLinker().downcallHandle(library.find(name).orElseThrow(), type);
        try {
            return function.invokeWithArguments(values);
        } catch (RuntimeException | Error problem) {
            throw problem;
        } catch (Throwable problem) {
            throw new IllegalStateException(problem);
        }
    }

    private String text(Object address) {
        MemorySegment found = (MemorySegment) address;
        return found.address() == 0 ? "" : found.reinterpret(1 << 20).getString(0);
    }

    /** The extents of an input, -1 where they are free. */
    long[] inputShape(int number) {
        long[] shape = new long[(int) call("tcomp_model_rank", INT, arguments(POINTER, INT, INT), model, INPUT, number)];
        for (int axis = 0; axis < shape.length; axis++) {
            shape[axis] = (long) call("tcomp_model_extent", LONG, arguments(POINTER, INT, INT, INT), model, INPUT, number, axis);
        }
        return shape;
    }

    private void check(int kind, int number) {
        Object type = call("tcomp_model_type", POINTER, arguments(POINTER, INT, INT), model, kind, number);
        if (!text(type).equals("float32")) {
            throw new Refused((kind == INPUT ? "input " : "output ") + number + " is not of float32");
        }
    }

    /** Runs the model on one input of float32, in a session of its own, and returns its first output. */
    float[] run(float[] values, long[] shape) {
        long count = 1;
        for (long extent : shape) {
            count = Math.multiplyExact(count, extent);
        }
        if (count != values.length) {
            throw new Refused("there are not as many values as the shape says");
        }
        check(INPUT, 0);
        check(OUTPUT, 0);
        try (Arena run = Arena.ofConfined()) {
            MemorySegment why = run.allocate(MESSAGE, 1);
            MemorySegment place = run.allocate(8, 8);
            MemoryLayout[] made = arguments(POINTER, POINTER, POINTER, LONG);
            if ((int) call("tcomp_session_new", INT, made, model, place, why, (long) MESSAGE) != 0) {
                throw new Refused(why.getString(0));
            }
            MemorySegment session = place.get(ValueLayout.ADDRESS, 0);
            try {
                MemorySegment data = run.allocate(4L * values.length + 4, 64);
                MemorySegment extents = run.allocate(8L * shape.length + 8, 8);
                MemorySegment.copy(values, 0, data, ValueLayout.JAVA_FLOAT, 0, values.length);
                MemorySegment.copy(shape, 0, extents, ValueLayout.JAVA_LONG, 0, shape.length);
                int set = (int) call("tcomp_session_set_input", INT, arguments(POINTER, INT, POINTER, POINTER, INT),
                        session, 0, data, extents, shape.length);
                if (set != 0 || (int) call("tcomp_session_run", INT, arguments(POINTER), session) != 0) {
                    throw new Refused(text(call("tcomp_session_message", POINTER, arguments(POINTER), session)));
                }
                long bytes = (long) call("tcomp_session_output_bytes", LONG, arguments(POINTER, INT), session, 0);
                MemorySegment output = (MemorySegment) call("tcomp_session_output", POINTER, arguments(POINTER, INT), session, 0);
                return output.reinterpret(bytes).toArray(ValueLayout.JAVA_FLOAT);
            } finally {
                call("tcomp_session_free", null, arguments(POINTER), session);
            }
        }
    }

    @Override
    public void close() {
        call("tcomp_model_free", null, arguments(POINTER), model);
        arena.close();
    }
}
