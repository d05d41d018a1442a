package java.lang.foreign;

public interface MemorySegment {
    long address();
    String getString(long offset);
    MemorySegment get(AddressLayout layout, long offset);
    MemorySegment reinterpret(long size);
    float[] toArray(ValueLayout.OfFloat layout);
    static void copy(Object from, int index, MemorySegment to, ValueLayout layout, long offset, int count) {}
}
