package java.lang.foreign;

public interface FunctionDescriptor {
    static FunctionDescriptor of(MemoryLayout result, MemoryLayout... arguments) { return null; }
    static FunctionDescriptor ofVoid(MemoryLayout... arguments) { return null; }
}
