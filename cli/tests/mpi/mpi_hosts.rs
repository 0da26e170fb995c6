//! Tests two hosts on one machine: connected network namespaces, each with its own host name.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn_megatron_test_support::skipped;

use crate::processes::{PROGRAM, Stage, run, start};

const PATIENCE: Duration = Duration::from_secs(60);
const RANKS: usize = 4;

/// Two network namespaces, which are removed on drop.
struct Hosts<'a> {
    stage: &'a Stage,
    names: [String; 2],
    net: String,
}

impl<'a> Hosts<'a> {
    /// Creates the namespaces, which requires root. Otherwise skips the test.
    fn new(stage: &'a Stage) -> Option<Self> {
        // Interface names must be short.
        let number = std::process::id() % 10_000;
        let hosts = Self {
            stage,
            names: ["a", "b"].map(|side| format!("bm{number}{side}")),
            net: format!("10.{}.{}", 64 + number % 64, number % 250),
        };
        let made = hosts.make();
        if made.is_none() {
            skipped("network namespaces need root and the program ip");
        }
        made.map(|()| hosts)
    }

    fn make(&self) -> Option<()> {
        let [a, b] = &self.names;
        for name in &self.names {
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        ip(&format!(
            "link add {a} netns {a} type veth peer name {b} netns {b}"
        ))?;
        for (name, address) in self.names.iter().zip(self.addresses()) {
            ip(&format!("-n {name} address add {address}/24 dev {name}"))?;
            ip(&format!("-n {name} link set {name} up"))?;
        }
        Some(())
    }

    fn addresses(&self) -> [String; 2] {
        [1, 2].map(|host| format!("{}.{host}", self.net))
    }

    /// Creates the remote shell of mpirun: a script that is called with an address and a command.
    fn agent(&self) -> PathBuf {
        let path = self.stage.path().join("agent.sh");
        let name = &self.names[1];
        let script = format!(
            "#!/bin/sh\nshift\nexec ip netns exec {name} unshare --uts \
             sh -c 'hostname {name}; exec sh -c \"$0\"' \"$*\"\n"
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Returns the mpirun arguments for these hosts.
    fn mpirun_args(&self) -> String {
        let (agent, net) = (self.agent(), format!("{}.0/24", self.net));
        format!(
            "--mca plm_rsh_agent {} --mca btl_tcp_if_include {net} --mca oob_tcp_if_include {net}",
            agent.display()
        )
    }

    /// Returns the hosts and their slots, as in `two:2,hosts:2`.
    fn hosts(&self) -> String {
        let [a, b] = self.addresses();
        format!("{a}:2,{b}:2")
    }

    /// Returns a command on the first host.
    fn on_first(&self, words: &[&str]) -> Command {
        let name = &self.names[0];
        let mut command = self.stage.command("ip");
        command.args(["netns", "exec", name, "unshare", "--uts", "sh", "-c"]);
        command
            .arg(format!("hostname {name}; exec \"$@\""))
            .arg("sh")
            .args(words);
        command
    }

    fn mpirun(&self) -> Command {
        let (ranks, hosts, arguments) = (RANKS.to_string(), self.hosts(), self.mpirun_args());
        let mut words = vec![
            "mpirun",
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            &ranks,
        ];
        words.extend(["--host", &hosts, "-x", "BURN_MEGATRON_TEST_MARK"]);
        words.extend(arguments.split(' '));
        words.push(PROGRAM);
        self.on_first(&words)
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns delete {name}"));
        }
    }
}

/// Output of a process, which is read while the process runs.
struct Told(Arc<Mutex<String>>);

impl Told {
    fn by(from: impl Read + Send + 'static) -> Self {
        let told = Arc::new(Mutex::new(String::new()));
        let text = told.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                let mut text = text.lock().unwrap();
                text.push_str(&line);
                text.push('\n');
            }
        });
        Self(told)
    }

    fn all(&self) -> String {
        self.0.lock().unwrap().clone()
    }

    fn await_text(&self, wanted: &str, patience: Duration) {
        let until = Instant::now() + patience;
        while !self.all().contains(wanted) {
            assert!(
                Instant::now() < until,
                "\"{wanted}\" did not come:\n{}",
                self.all()
            );
            sleep(Duration::from_millis(20));
        }
    }
}

fn ip(words: &str) -> Option<()> {
    let mut command = Command::new("ip");
    command.args(words.split(' ')).stderr(Stdio::null());
    command.status().ok()?.success().then_some(())
}

#[test]
fn two_hosts_train_to_the_bits_of_one() {
    let stage = Stage::new("hosts");
    let Some(hosts) = Hosts::new(&stage) else {
        return;
    };
    let starts = [
        ("threads", stage.command(PROGRAM)),
        ("mpirun", hosts.mpirun()),
    ];
    let metrics = starts.map(|(name, mut command)| {
        let command = stage.pretrain(&mut command, name);
        let ended = run(command.args(["--tp", "2", "--dp", "2"]), PATIENCE);
        assert_eq!(ended.code, Some(0), "{name}: {}", ended.all());
        stage.expect_nothing_left();
        stage.read(&format!("{name}/metrics.jsonl"))
    });
    assert_eq!(metrics[1], metrics[0]);
}

/// Runs with a fault on the second host, which has ranks 2 and 3. The fault must be reported once, and no process may
/// be left.
fn strike_second_host(stage: &Stage, hosts: &Hosts, fault: &str, says: &[&str]) -> Option<i32> {
    let run_dir = fault.split(',').next().unwrap();
    let mut command = hosts.mpirun();
    let command = stage.pretrain(&mut command, run_dir);
    command.args(["--tp", "2", "--dp", "2", "--timeout", "6"]);
    command.args(["--heartbeat-timeout", "3", "--inject", fault]);
    let ended = run(command, PATIENCE);
    stage.expect_nothing_left();
    println!("| `{fault}` | {:?} | {:.1?} |", ended.code, ended.took);
    let reports = ended.errors.matches(" failed: ").count();
    assert_eq!(reports, 1, "{fault}: {}", ended.all());
    for what in says {
        let is_said = ended.errors.contains(what);
        assert!(is_said, "{fault}: \"{what}\" is missing:\n{}", ended.all());
    }
    ended.code
}

#[test]
fn a_killed_process_of_one_host_ends_both_hosts() {
    let stage = Stage::new("killed");
    let Some(hosts) = Hosts::new(&stage) else {
        return;
    };
    let exited = "exited without reporting an error";
    let says = ["rank 2 failed: its process", exited];
    let code = strike_second_host(&stage, &hosts, "kill@rank=2,step=3,call=5", &says);
    assert_eq!(code, Some(137));
}

#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn faults_on_the_second_host_are_reported_as_others() {
    let stage = Stage::new("second");
    let Some(hosts) = Hosts::new(&stage) else {
        return;
    };
    let silent = "has sent no heartbeat for 3 s";
    for (fault, code, says) in [
        (
            "kill@rank=3,step=3,call=5",
            Some(137),
            ["rank 3 failed: its process", "exited without"],
        ),
        (
            "abort@rank=2,step=3,call=5",
            Some(134),
            ["rank 2 failed: its process", "exited without"],
        ),
        (
            "error@rank=2,step=3,call=5",
            None,
            ["rank 2 failed: fault injection", "in step 3"],
        ),
        (
            "panic@rank=3,step=3,call=5",
            None,
            ["rank 3 failed: ", "in step 3"],
        ),
        (
            "wrong-call@rank=3,step=3,call=5",
            None,
            ["mismatch at call", "the operations differ"],
        ),
        (
            "shape@rank=2,step=3,call=5",
            None,
            ["mismatch at call", "the lengths differ"],
        ),
        (
            "drop@rank=3,step=3,call=5",
            None,
            ["deadline: after ", "in step 3"],
        ),
        (
            "stop@rank=3,step=3,call=5",
            None,
            ["rank 3 failed: its process", silent],
        ),
        (
            "stop@rank=2,step=3,call=5",
            None,
            ["rank 2 failed: its process", silent],
        ),
    ] {
        let found = strike_second_host(&stage, &hosts, fault, &says);
        // If several processes end with an error, mpirun returns the exit code of the first error that reaches it.
        match code {
            Some(code) => assert_eq!(found, Some(code), "{fault}"),
            None => assert_ne!(found, Some(0), "{fault}"),
        }
    }
}

/// Cuts the link during training. The first host reports the lost ranks, and the ranks of both hosts end.
#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn a_link_is_cut_in_the_middle() {
    let stage = Stage::new("cut");
    let Some(hosts) = Hosts::new(&stage) else {
        return;
    };
    let mut command = hosts.mpirun();
    let command = stage.pretrain(&mut command, "run");
    let flags = [
        "--tp",
        "2",
        "--dp",
        "2",
        "--steps",
        "100000",
        "--heartbeat-timeout",
        "3",
    ];
    let mut child = start(command.args(flags));
    let told = Told::by(child.stderr.take().unwrap());
    told.await_text("step 1/", Duration::from_secs(60));
    let [name, _] = &hosts.names;
    ip(&format!("-n {name} link set {name} down")).unwrap();
    let cut = Instant::now();
    told.await_text("has sent no heartbeat for 3 s", PATIENCE);
    let lost = |told: &str| told.contains("rank 2 failed: ") || told.contains("rank 3 failed: ");
    assert!(lost(&told.all()), "{}", told.all());
    // Each side detects the loss on its own. Open MPI's own processes wait for a TCP timeout, which takes minutes.
    let ours = || {
        let mut living = stage.living();
        living.retain(|(_, command)| command.starts_with(PROGRAM));
        living
    };
    let until = Instant::now() + Duration::from_secs(30);
    while !ours().is_empty() && Instant::now() < until {
        sleep(Duration::from_millis(100));
    }
    let took = cut.elapsed().as_secs_f64();
    println!("both sides have ended {took:.1} s after the cut");
    assert!(ours().is_empty(), "{:#?}", ours());
    child.kill().unwrap();
    child.wait().unwrap();
}
