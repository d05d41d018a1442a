package java.lang.foreign;

import java.nio.file.Path;
import java.util.Optional;

public interface SymbolLookup {
    static SymbolLookup libraryLookup(Path path, Arena arena) { return null; }
    Optional<MemorySegment> find(String name);
}
