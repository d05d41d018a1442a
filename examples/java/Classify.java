import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;

/** Classify MODEL.tcomp INPUT.bin: runs a model on the values in a file, and prints where its first output is largest. */
final class Classify {
    public static void main(String[] arguments) throws Exception {
        if (arguments.length != 2) {
            System.err.println("usage: Classify MODEL.tcomp INPUT.bin");
            System.exit(2);
        }
        try (Tcomp model = new Tcomp(Path.of(System.getProperty("libtcomp", "./libtcomp.so")), arguments[0], 0)) {
            ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(Path.of(arguments[1]))).order(ByteOrder.LITTLE_ENDIAN);
            float[] values = new float[bytes.remaining() / 4];
            bytes.asFloatBuffer().get(values);
            long[] shape = model.inputShape(0);
            for (int axis = 0; axis < shape.length; axis++) {
                shape[axis] = Math.max(shape[axis], shape[axis] < 0 ? 1 : 0);
            }
            float[] scores = model.run(values, shape);
            int best = 0;
            for (int i = 1; i < scores.length; i++) {
                best = scores[i] > scores[best] ? i : best;
            }
            System.out.println("class " + best);
        } catch (Tcomp.Refused problem) {
            System.err.println("error: " + problem.getMessage());
            System.exit(2);
        }
    }
}
