package java.lang.foreign;

public interface MemoryLayout {}
