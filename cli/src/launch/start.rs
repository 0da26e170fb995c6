//! Starts the agents of the ranks, and reports when they exit.

use std::collections::HashMap;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use burn_megatron::comm::Token;
use libc::pid_t;

use super::error::LaunchError;
use super::exit_status::RankExitStatus;
use super::monitor::JobMonitor;
use super::mpirun::{self, MpirunMessages};
use super::plan::{LaunchPlan, Starter, free_port};
use super::protocol::AGENT_SERVER_ADDRESS;
use super::supervise::SupervisorEvent;
use super::{agent_command, sys};

/// The variable with the address of the rendezvous.
const RENDEZVOUS: &str = "BURN_MEGATRON_RENDEZVOUS";
/// The variable with the token for it.
const TOKEN: &str = Token::VARIABLE;
/// The variable with the default communication engine.
const ENGINE: &str = crate::ranks::ENGINE;

/// The processes that were started: the agents, or mpirun.
pub struct StartedProcesses {
    /// The children that have not been waited for, so that their process ids are still valid.
    live: Arc<Mutex<HashMap<u32, Child>>>,
    /// Whether the child is mpirun.
    is_mpirun: bool,
    /// mpirun's messages that were held back.
    pub remarks: MpirunMessages,
}

impl StartedProcesses {
    /// Starts the agents of a plan. Call it on a thread that lives as long as the ranks.
    pub fn start(
        plan: &LaunchPlan,
        link: &dyn Fn(&str) -> String,
        monitor: &dyn JobMonitor,
        events: Sender<SupervisorEvent>,
    ) -> Result<Self, LaunchError> {
        match &plan.starter {
            Starter::Spawn { host, port } => spawn_agents(plan, host, *port, link, monitor, events),
            Starter::Mpirun { .. } => through_mpirun(plan, link, monitor, events),
        }
    }

    /// Ends the processes, and with them the ranks. mpirun gets SIGTERM, and takes a second or two.
    pub fn end(&self) {
        if self.is_mpirun {
            self.signal(libc::SIGTERM)
        } else {
            self.signal(libc::SIGKILL)
        }
    }

    /// Kills the processes.
    pub fn kill(&self) {
        self.signal(libc::SIGKILL);
    }

    fn signal(&self, signal: i32) {
        for process in lock(&self.live).keys() {
            sys::kill(*process as pid_t, signal);
        }
    }
}

fn spawn_agents(
    plan: &LaunchPlan,
    host: &str,
    port: u16,
    link: &dyn Fn(&str) -> String,
    monitor: &dyn JobMonitor,
    events: Sender<SupervisorEvent>,
) -> Result<StartedProcesses, LaunchError> {
    let port = match port {
        0 => free_port().map_err(LaunchError::system("no free port for the rendezvous"))?,
        port => port,
    };
    let shared = shared_variables(plan, host, port, link("127.0.0.1"), monitor);
    let mut children = HashMap::new();
    let mut ranks = HashMap::new();
    for local in 0..plan.ranks {
        let child = agent_process(plan, local)?.envs(shared.clone()).spawn();
        let child = child.map_err(LaunchError::system("a process cannot be started"))?;
        ranks.insert(child.id(), plan.first + local);
        children.insert(child.id(), child);
    }
    let live = Arc::new(Mutex::new(children));
    let mut left = plan.ranks;
    wait_for_children(&live, move |child, _| {
        let rank = ranks.get(&child).copied();
        left -= 1;
        let last = (left == 0).then_some(SupervisorEvent::StarterExited(None));
        for event in rank
            .map(SupervisorEvent::AgentExited)
            .into_iter()
            .chain(last)
        {
            let _ = events.send(event);
        }
    })?;
    Ok(StartedProcesses {
        live,
        is_mpirun: false,
        remarks: MpirunMessages::default(),
    })
}

/// The command of the agent of a local rank.
fn agent_process(plan: &LaunchPlan, local: usize) -> Result<Command, LaunchError> {
    let words = agent_command(plan)?;
    let mut command = Command::new(&words[0]);
    command
        .args(&words[1..])
        .env("RANK", (plan.first + local).to_string())
        .env("WORLD_SIZE", plan.world.to_string())
        .env("LOCAL_RANK", local.to_string())
        .env("LOCAL_WORLD_SIZE", plan.ranks.to_string())
        // Ctrl-C in a terminal goes to the launcher alone.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

/// The variables that are the same for all ranks.
fn shared_variables(
    plan: &LaunchPlan,
    host: &str,
    port: u16,
    link: String,
    monitor: &dyn JobMonitor,
) -> Vec<(&'static str, String)> {
    let all = [
        (AGENT_SERVER_ADDRESS, link),
        ("MASTER_ADDR", host.to_owned()),
        ("MASTER_PORT", port.to_string()),
    ];
    all.into_iter().chain(rendezvous(plan, monitor)).collect()
}

/// The address of the rendezvous, the token for it, and the communication engine.
fn rendezvous(plan: &LaunchPlan, monitor: &dyn JobMonitor) -> [(&'static str, String); 3] {
    let engine = match plan.starter {
        Starter::Spawn { .. } => "nccl",
        Starter::Mpirun { .. } => "mpi",
    };
    [
        (RENDEZVOUS, monitor.address()),
        (TOKEN, plan.token.reveal()),
        (ENGINE, engine.into()),
    ]
}

fn through_mpirun(
    plan: &LaunchPlan,
    link: &dyn Fn(&str) -> String,
    monitor: &dyn JobMonitor,
    events: Sender<SupervisorEvent>,
) -> Result<StartedProcesses, LaunchError> {
    let Starter::Mpirun {
        mpirun,
        hosts,
        arguments,
        host,
    } = &plan.starter
    else {
        unreachable!("called only for mpirun");
    };
    let failed = LaunchError::system;
    let link = [(AGENT_SERVER_ADDRESS, link(host))].into_iter();
    let variables: Vec<_> = link.chain(rendezvous(plan, monitor)).collect();
    let hosts = hosts.as_deref();
    let mut command = mpirun::command(plan, mpirun, hosts, arguments, &variables)?;
    command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // On SIGTERM mpirun ends its ranks on all hosts.
    sys::signal_on_parent_exit(&mut command, libc::SIGTERM);
    let mut child = command
        .spawn()
        .map_err(failed("mpirun cannot be started"))?;
    let remarks = MpirunMessages::default();
    let threads = [
        mpirun::read_in_thread(&remarks, child.stdout.take()),
        mpirun::read_in_thread(&remarks, child.stderr.take()),
    ];
    let live = Arc::new(Mutex::new(HashMap::from([(child.id(), child)])));
    let mut threads = Some(threads);
    wait_for_children(&live, move |_, status| {
        for thread in threads.take().into_iter().flatten().flatten().flatten() {
            // Its output has ended.
            let _ = thread.join();
        }
        let _ = events.send(SupervisorEvent::StarterExited(Some(status)));
    })?;
    Ok(StartedProcesses {
        live,
        is_mpirun: true,
        remarks,
    })
}

/// Calls `ended` for each child that exits, in a thread, until all have.
fn wait_for_children(
    live: &Arc<Mutex<HashMap<u32, Child>>>,
    mut ended: impl FnMut(u32, RankExitStatus) + Send + 'static,
) -> Result<(), LaunchError> {
    let live = Arc::clone(live);
    let wait = move || {
        while let Some((process, status)) = sys::wait_for_exited_child() {
            if let Some(mut child) = lock(&live).remove(&process) {
                // It has ended.
                let _ = child.wait();
            }
            ended(process, status);
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

    struct FixedMonitor(&'static str);

    impl JobMonitor for FixedMonitor {
        fn address(&self) -> String {
            self.0.into()
        }

        fn request_stop(&self) -> bool {
            true
        }

        fn failure_report(&self) -> Option<String> {
            None
        }

        fn failed_rank(&self) -> Option<usize> {
            None
        }

        fn process_ended(&self, _: usize, _: &str) {}
    }

    fn plan() -> LaunchPlan {
        LaunchPlan {
            command: vec!["rank".into(), "-v".into()],
            first: 0,
            ranks: 4,
            world: 4,
            starter: Starter::Spawn {
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
    fn ranks_get_the_address_of_the_rendezvous() {
        let monitor = FixedMonitor("10.0.0.1:99");
        let plan = plan();
        let variables = shared_variables(&plan, "10.0.0.1", 4567, "link".into(), &monitor);
        let mut command = Command::new("rank");
        command.envs(variables);
        assert_eq!(value(&command, RENDEZVOUS).as_deref(), Some("10.0.0.1:99"));
        assert_eq!(value(&command, ENGINE).as_deref(), Some("nccl"));
        assert_eq!(value(&command, TOKEN), Some(plan.token.reveal()));
    }

    #[test]
    fn mpirun_hands_the_variables_on() {
        let plan = plan();
        let variables = rendezvous(&plan, &FixedMonitor("a:99"));
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
        let tail = "launch-agent -- rank -v";
        assert_eq!(words[words.len() - 4..].join(" "), tail);
        // The token is passed in the environment: other users can read arguments.
        assert_eq!(value(&command, TOKEN), Some(plan.token.reveal()));
        assert_eq!(words.iter().filter(|word| **word == TOKEN).count(), 1);
        assert!(!words.iter().any(|word| word.contains(&plan.token.reveal())));
        // In front of the program, or the program would get it.
        let at = |wanted: &str| words.iter().position(|word| *word == wanted).unwrap();
        assert_eq!(words[at(RENDEZVOUS) - 1], "-x");
        assert!(at(RENDEZVOUS) < at("-q") && at("-q") < at("launch-agent"));
    }
}
