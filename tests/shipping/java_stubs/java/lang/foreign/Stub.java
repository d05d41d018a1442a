package java.lang.foreign;

final class Stub {
    static <T> T none() { return null; }
}
