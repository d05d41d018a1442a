package java.lang.foreign;

import java.lang.invoke.MethodHandle;

public interface Linker {
    interface Option {}
    static Linker nativeLinker() { return null; }
    MethodHandle downcallHandle(MemorySegment symbol, FunctionDescriptor function, Option... options);
}
