package java.lang.foreign;

public interface Arena extends SegmentAllocator, AutoCloseable {
    static Arena ofShared() { return null; }
    static Arena ofConfined() { return null; }
    MemorySegment allocate(long size, long alignment);
    void close();
}
