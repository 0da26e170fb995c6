//! Starts the keepers of the ranks, and sees when they have ended.

use std::collections::HashMap;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn_megatron::comm::Token;
use libc::pid_t;

use super::ending::Ending;
use super::error::LaunchError;
use super::frame::LINK;
use super::mpirun::{self, Remarks};
use super::plan::{Plan, Way, free_port};
use super::supervise::Event;
use super::watch::Watch;
use super::{keeper_command, sys};

/// The variable that tells the ranks where their launcher awaits them.
const RENDEZVOUS: &str = "BURN_MEGATRON_RENDEZVOUS";
/// The variable that lets them in there.
const TOKEN: &str = Token::VARIABLE;
/// The variable that tells them what joins them, unless a flag of theirs does.
const ENGINE: &str = crate::ranks::ENGINE;

/// What was started: the keepers themselves, or mpirun.
pub struct Started {
    /// The children that have not been waited for, so that their numbers are still theirs.
    live: Arc<Mutex<HashMap<u32, Child>>>,
    /// Whether the child is mpirun.
    is_mpirun: bool,
    /// What mpirun says.
    pub remarks: Remarks,
}

impl Started {
    /// Starts what the plan has. This must be a thread that lives as long as the ranks.
    pub fn start(
        plan: &Plan,
        link: &dyn Fn(&str) -> String,
        watch: &dyn Watch,
        events: Sender<Event>,
    ) -> Result<Self, LaunchError> {
        match &plan.way {
            Way::Own { host, port } => keepers(plan, host, *port, link, watch, events),
            Way::Mpirun { .. } => through_mpirun(plan, link, watch, events),
        }
    }

    /// Ends it, with the ranks: mpirun in its own way, which takes a second or two.
    pub fn end(&self) {
        match self.is_mpirun {
            true => self.signal(libc::SIGTERM),
            false => self.signal(libc::SIGKILL),
        }
    }

    /// Kills it.
    pub fn kill(&self) {
        self.signal(libc::SIGKILL);
    }

    fn signal(&self, signal: i32) {
        for process in lock(&self.live).keys() {
            sys::kill(*process as pid_t, signal);
        }
    }
}

fn keepers(
    plan: &Plan,
    host: &str,
    port: u16,
    link: &dyn Fn(&str) -> String,
    watch: &dyn Watch,
    events: Sender<Event>,
) -> Result<Started, LaunchError> {
    let port = match port {
        0 => free_port().map_err(LaunchError::system("no free port for the ranks to meet"))?,
        port => port,
    };
    let shared = shared_variables(plan, host, port, link("127.0.0.1"), watch);
    let mut children = HashMap::new();
    let mut ranks = HashMap::new();
    for local in 0..plan.ranks {
        let child = keeper(plan, local)?.envs(shared.clone()).spawn();
        let child = child.map_err(LaunchError::system("a process cannot be started"))?;
        ranks.insert(child.id(), plan.first + local);
        children.insert(child.id(), child);
    }
    let live = Arc::new(Mutex::new(children));
    let mut left = plan.ranks;
    await_children(&live, move |child, _| {
        let rank = ranks.get(&child).copied();
        left -= 1;
        let last = (left == 0).then_some(Event::StarterEnded(None));
        for event in rank.map(Event::KeeperGone).into_iter().chain(last) {
            let _ = events.send(event);
        }
    })?;
    Ok(Started {
        live,
        is_mpirun: false,
        remarks: Remarks::default(),
    })
}

/// The call that keeps the rank with this number on this machine.
fn keeper(plan: &Plan, local: usize) -> Result<Command, LaunchError> {
    let words = keeper_command(plan)?;
    let mut command = Command::new(&words[0]);
    command
        .args(&words[1..])
        .env("RANK", (plan.first + local).to_string())
        .env("WORLD_SIZE", plan.world.to_string())
        .env("LOCAL_RANK", local.to_string())
        .env("LOCAL_WORLD_SIZE", plan.ranks.to_string())
        // Ctrl-C in a terminal is for the launcher alone.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

/// What all ranks are told alike.
fn shared_variables(
    plan: &Plan,
    host: &str,
    port: u16,
    link: String,
    watch: &dyn Watch,
) -> Vec<(&'static str, String)> {
    let all = [
        (LINK, link),
        ("MASTER_ADDR", host.to_owned()),
        ("MASTER_PORT", port.to_string()),
    ];
    all.into_iter().chain(rendezvous(plan, watch)).collect()
}

/// Where the launcher awaits the ranks, what lets them in, and what joins them.
fn rendezvous(plan: &Plan, watch: &dyn Watch) -> [(&'static str, String); 3] {
    let engine = match plan.way {
        Way::Own { .. } => "nccl",
        Way::Mpirun { .. } => "mpi",
    };
    [
        (RENDEZVOUS, watch.address()),
        (TOKEN, plan.token.reveal()),
        (ENGINE, engine.into()),
    ]
}

fn through_mpirun(
    plan: &Plan,
    link: &dyn Fn(&str) -> String,
    watch: &dyn Watch,
    events: Sender<Event>,
) -> Result<Started, LaunchError> {
    let Way::Mpirun {
        mpirun,
        hosts,
        arguments,
        host,
    } = &plan.way
    else {
        unreachable!("it is called for mpirun");
    };
    let failed = LaunchError::system;
    let link = [(LINK, link(host))].into_iter();
    let variables: Vec<_> = link.chain(rendezvous(plan, watch)).collect();
    let hosts = hosts.as_deref();
    let mut command = mpirun::command(plan, mpirun, hosts, arguments, &variables)?;
    command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // On SIGTERM it ends its ranks, wherever they are.
    sys::end_with_parent(&mut command, libc::SIGTERM);
    let mut child = command
        .spawn()
        .map_err(failed("mpirun cannot be started"))?;
    let remarks = Remarks::default();
    let threads = [
        mpirun::read_in_thread(&remarks, child.stdout.take()),
        mpirun::read_in_thread(&remarks, child.stderr.take()),
    ];
    let live = Arc::new(Mutex::new(HashMap::from([(child.id(), child)])));
    let mut threads = Some(threads);
    await_children(&live, move |_, ending| {
        for thread in threads.take().into_iter().flatten().flatten().flatten() {
            // Its output has ended with it.
            let _ = thread.join();
        }
        let _ = events.send(Event::StarterEnded(Some(ending)));
    })?;
    Ok(Started {
        live,
        is_mpirun: true,
        remarks,
    })
}

/// Tells of each child that ends, in a thread, until all have.
fn await_children(
    live: &Arc<Mutex<HashMap<u32, Child>>>,
    mut ended: impl FnMut(u32, Ending) + Send + 'static,
) -> Result<(), LaunchError> {
    let live = Arc::clone(live);
    let wait = move || {
        while let Some((process, ending)) = sys::next_ended_child() {
            if let Some(mut child) = lock(&live).remove(&process) {
                // It has ended.
                let _ = child.wait();
            }
            ended(process, ending);
        }
    };
    let builder = thread::Builder::new().name("children".into());
    let started = builder.spawn(wait);
    started
        .map(drop)
        .map_err(LaunchError::system("a thread cannot be started"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    struct At(&'static str);

    impl Watch for At {
        fn address(&self) -> String {
            self.0.into()
        }

        fn request_stop(&self) -> bool {
            true
        }

        fn verdict(&self) -> Option<String> {
            None
        }

        fn culprit(&self) -> Option<usize> {
            None
        }

        fn process_ended(&self, _: usize, _: &str) {}
    }

    fn plan() -> Plan {
        Plan {
            command: vec!["rank".into(), "-v".into()],
            first: 0,
            ranks: 4,
            world: 4,
            way: Way::Own {
                host: String::new(),
                port: 0,
            },
            token: Token::random().unwrap(),
        }
    }

    fn value(command: &Command, name: &str) -> Option<String> {
        let mut variables = command.get_envs();
        let (_, value) = variables.find(|(known, _)| *known == name)?;
        Some(value?.to_string_lossy().into_owned())
    }

    #[test]
    fn ranks_are_told_of_the_launcher_that_awaits_them() {
        let watch = At("10.0.0.1:99");
        let plan = plan();
        let variables = shared_variables(&plan, "10.0.0.1", 4567, "link".into(), &watch);
        let mut command = Command::new("rank");
        command.envs(variables);
        assert_eq!(value(&command, RENDEZVOUS).as_deref(), Some("10.0.0.1:99"));
        assert_eq!(value(&command, ENGINE).as_deref(), Some("nccl"));
        assert_eq!(value(&command, TOKEN), Some(plan.token.reveal()));
    }

    #[test]
    fn mpirun_hands_the_variables_on() {
        let plan = plan();
        let variables = rendezvous(&plan, &At("a:99"));
        let arguments = ["-q".to_owned()];
        let mpirun = Path::new("mpirun");
        let command = mpirun::command(&plan, mpirun, Some("a:2,b:2"), &arguments, &variables);
        let command = command.unwrap();
        assert_eq!(value(&command, RENDEZVOUS).as_deref(), Some("a:99"));
        let words: Vec<_> = command
            .get_args()
            .map(|word| word.to_str().unwrap())
            .collect();
        let head = "-n 4 --oversubscribe --bind-to none --host a:2,b:2";
        assert_eq!(words[..7].join(" "), head);
        let tail = "launch-keeper -- rank -v";
        assert_eq!(words[words.len() - 4..].join(" "), tail);
        // The token goes by the environment: arguments are there for all to see.
        assert_eq!(value(&command, TOKEN), Some(plan.token.reveal()));
        assert_eq!(words.iter().filter(|word| **word == TOKEN).count(), 1);
        assert!(!words.iter().any(|word| word.contains(&plan.token.reveal())));
        // In front of the program, or it would be for that.
        let at = |wanted: &str| words.iter().position(|word| *word == wanted).unwrap();
        assert_eq!(words[at(RENDEZVOUS) - 1], "-x");
        assert!(at(RENDEZVOUS) < at("-q") && at("-q") < at("launch-keeper"));
    }
}
