package java.lang.foreign;

public interface ValueLayout extends MemoryLayout {
    interface OfInt extends ValueLayout {}
    interface OfLong extends ValueLayout {}
    interface OfFloat extends ValueLayout {}
    OfInt JAVA_INT = Stub.none();
    OfLong JAVA_LONG = Stub.none();
    OfFloat JAVA_FLOAT = Stub.none();
    AddressLayout ADDRESS = Stub.none();
}
