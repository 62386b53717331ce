// SPDX-License-Identifier: Apache-2.0
import static java.lang.foreign.ValueLayout.ADDRESS;
import static java.lang.foreign.ValueLayout.JAVA_BYTE;
import static java.lang.foreign.ValueLayout.JAVA_FLOAT;
import static java.lang.foreign.ValueLayout.JAVA_INT;
import static java.lang.foreign.ValueLayout.JAVA_LONG;

import java.io.IOException;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.StructLayout;
import java.lang.foreign.SymbolLookup;
import java.lang.invoke.MethodHandle;
import java.nio.file.Files;
import java.nio.file.Path;

/**
 * Trains with a step that {@code convgrad build} wrote, in Java, by the C library and the foreign function interface of
 * Java 22 and newer (java.lang.foreign); nothing has to be generated or compiled beforehand.
 *
 * <pre>java --enable-native-access=ALL-UNNAMED Train.java LIBCONVGRAD.so STEP.so STEPS X.raw Y.raw [TO.ckpt]</pre>
 *
 * <p>One batch is used for all steps. X.raw and Y.raw contain it as plain numbers in the element types of the step. The
 * loss of each step is printed with as many digits as tell any two floats apart.
 */
public final class Train {
  /** convgrad_array and convgrad_buffer of convgrad.h: an address, and a size in bytes. */
  private static final StructLayout ARRAY =
      MemoryLayout.structLayout(ADDRESS.withName("data"), JAVA_LONG.withName("bytes"));

  /** convgrad_batch: the inputs, their number, and the target. */
  private static final StructLayout BATCH =
      MemoryLayout.structLayout(ADDRESS.withName("inputs"), JAVA_LONG.withName("input_count"), ARRAY.withName("target"));

  private static final long ALIGNMENT = 64; // arrays that begin at a multiple of it are not copied

  private final SymbolLookup library;

  private Train(SymbolLookup library) {
    this.library = library;
  }

  /** A function of the C library. */
  private MethodHandle function(String name, MemoryLayout result, MemoryLayout... arguments) {
    MemorySegment address = library.find("convgrad_" + name).orElseThrow(() -> new IllegalStateException(
        "the library has no function convgrad_" + name));
    FunctionDescriptor type = result == null
        ? FunctionDescriptor.ofVoid(arguments) : FunctionDescriptor.of(result, arguments);
    return Linker.nativeLinker().downcallHandle(address, type);
  }

  /** Throws the error message of the last call if its code is not CONVGRAD_OK. */
  private void check(int code) throws Throwable {
    if (code != 0) {
      MemorySegment text = (MemorySegment) function("last_error", ADDRESS).invokeExact();
      throw new IllegalStateException(text.reinterpret(Long.MAX_VALUE).getString(0));
    }
  }

  /** The bytes of a file in memory that the C library reads in place, as a convgrad_array. */
  private static void read(Path file, Arena arena, MemorySegment array) throws IOException {
    byte[] content = Files.readAllBytes(file);
    MemorySegment data = arena.allocate(content.length, ALIGNMENT);
    MemorySegment.copy(content, 0, data, JAVA_BYTE, 0, content.length);
    array.set(ADDRESS, 0, data);
    array.set(JAVA_LONG, ADDRESS.byteSize(), content.length);
  }

  private void train(String step, int steps, Path x, Path y, String checkpoint, Arena arena) throws Throwable {
    MethodHandle open = function("open", JAVA_INT, ADDRESS, ADDRESS);
    MethodHandle trainStep = function("train_step", JAVA_INT, ADDRESS, ADDRESS, ADDRESS, ARRAY);
    MethodHandle save = function("save_checkpoint", JAVA_INT, ADDRESS, ADDRESS);
    MethodHandle close = function("close", null, ADDRESS);

    MemorySegment opened = arena.allocate(ADDRESS);
    check((int) open.invokeExact(arena.allocateFrom(step), opened));
    MemorySegment session = opened.get(ADDRESS, 0);
    try {
      MemorySegment input = arena.allocate(ARRAY);
      MemorySegment batch = arena.allocate(BATCH);
      read(x, arena, input);
      batch.set(ADDRESS, 0, input);
      batch.set(JAVA_LONG, ADDRESS.byteSize(), 1);
      read(y, arena, batch.asSlice(BATCH.byteOffset(MemoryLayout.PathElement.groupElement("target")), ARRAY));
      MemorySegment notWanted = arena.allocate(ARRAY); // {NULL, 0}: the predictions are not returned
      MemorySegment loss = arena.allocate(JAVA_FLOAT);
      for (int number = 1; number <= steps; ++number) {
        check((int) trainStep.invokeExact(session, batch, loss, notWanted));
        System.out.println("step " + number + " loss " + loss.get(JAVA_FLOAT, 0));
      }
      if (checkpoint != null) {
        check((int) save.invokeExact(session, arena.allocateFrom(checkpoint)));
      }
    } finally {
      close.invokeExact(session);
    }
  }

  public static void main(String[] arguments) throws Throwable {
    if (arguments.length != 5 && arguments.length != 6) {
      System.err.println("usage: Train.java LIBCONVGRAD.so STEP.so STEPS X.raw Y.raw [TO.ckpt]");
      System.exit(2);
    }
    try (Arena arena = Arena.ofConfined()) {
      SymbolLookup library = SymbolLookup.libraryLookup(Path.of(arguments[0]), arena);
      String checkpoint = arguments.length == 6 ? arguments[5] : null;
      new Train(library).train(arguments[1], Integer.parseInt(arguments[2]), Path.of(arguments[3]),
          Path.of(arguments[4]), checkpoint, arena);
    } catch (IllegalStateException error) {
      System.err.println("Train: " + error.getMessage());
      System.exit(1);
    }
  }
}
