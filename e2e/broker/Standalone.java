import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.pulsar.PulsarStandaloneStarter;

/**
 * A Pulsar standalone (ZooKeeper, bookie and broker in one process) whose broker answers lookups as one of several.
 *
 * <p>A plain standalone tells clients to go through the service URL whatever broker owns the topic, because it takes
 * itself for the only one; with a second broker in the cluster they end at the wrong one ("not served by this
 * instance"). The flag is set by start(), so it can only be undone after it. Then the file READY appears in the working
 * folder.
 */
public final class Standalone {
    private Standalone() {
    }

    public static void main(String[] args) throws Exception {
        PulsarStandaloneStarter standalone = new PulsarStandaloneStarter(args);
        standalone.start();
        standalone.getConfig().setRunningStandalone(false);
        Files.createFile(Path.of("READY"));
    }
}
