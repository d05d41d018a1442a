package java.lang.foreign;

public interface SegmentAllocator {
    default MemorySegment allocateFrom(String text) { return null; }
}
