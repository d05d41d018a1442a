package java.lang.foreign;

public interface AddressLayout extends ValueLayout {}
