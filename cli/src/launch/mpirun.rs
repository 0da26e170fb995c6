//! Open MPI's mpirun: its command line and its messages.

use std::env;
use std::io::{self, BufRead, BufReader, Read};
use std::mem;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::LaunchError;
use super::plan::LaunchPlan;
use super::{agent_command, print_line, program, sys};

/// Prefixes of the environment variables that are forwarded to ranks on other machines.
const FORWARDED_VARIABLES: [&str; 7] = [
    "BURN_",
    "CUBECL_",
    "LD_LIBRARY_PATH",
    "NCCL_",
    "OMP_",
    "RAYON_",
    "RUST_",
];

/// The mpirun at a path, or the one on PATH, which must be Open MPI's.
pub fn find(path: Option<&Path>) -> Result<PathBuf, LaunchError> {
    let path = match path {
        Some(path) => program::find(path)?,
        None => program::on_path(Path::new("mpirun")).ok_or(LaunchError::NoMpirun)?,
    };
    let said = Command::new(&path)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| LaunchError::Program {
            program: path.clone(),
            reason: error.to_string(),
        })?;
    let said = String::from_utf8_lossy(&said.stdout);
    let first = said.lines().next().unwrap_or("--version prints nothing");
    if first.contains("Open MPI") {
        Ok(path)
    } else {
        Err(LaunchError::OtherMpirun {
            path,
            said: first.to_owned(),
        })
    }
}

/// The names in a list of hosts such as `a:2,b:2`.
pub fn names(hosts: &str) -> Result<Vec<&str>, LaunchError> {
    let name = |entry| {
        let (name, ranks) = match str::split_once(entry, ':') {
            Some((name, ranks)) => (name, ranks.parse().unwrap_or(0usize)),
            None => (entry, 1),
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let fits = ranks > 0 && !name.is_empty() && name.chars().all(is_name);
        fits.then_some(name).ok_or_else(|| LaunchError::Host {
            hosts: hosts.to_owned(),
            entry: entry.to_owned(),
        })
    };
    hosts.split(',').map(name).collect()
}

/// Splits a line into words as a shell does: at blanks outside of quotes.
pub fn words(line: &str) -> Result<Vec<String>, LaunchError> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    match quote {
        None => Ok(words),
        Some(_) => Err(LaunchError::Quote(line.to_owned())),
    }
}

/// The mpirun command that starts the agents of all ranks with `variables`.
pub fn command(
    plan: &LaunchPlan,
    mpirun: &Path,
    hosts: Option<&str>,
    arguments: &[String],
    variables: &[(&str, String)],
) -> Result<Command, LaunchError> {
    let mut command = Command::new(mpirun);
    command.args([
        "-n",
        &plan.ranks.to_string(),
        "--oversubscribe",
        "--bind-to",
        "none",
    ]);
    if let Some(hosts) = hosts {
        command.args(["--host", hosts]);
    }
    let own = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let is_new = |name: &String| variables.iter().any(|(known, _)| known == name);
    let forwarded = own.filter(|name| {
        FORWARDED_VARIABLES
            .iter()
            .any(|start| name.starts_with(start))
    });
    let forwarded = forwarded.filter(|name| !is_new(name));
    for name in forwarded {
        command.args(["-x", &name]);
    }
    for (name, value) in variables {
        command.env(name, value).args(["-x", name]);
    }
    // Aggregated messages can be lost when the failing rank exits at once.
    command.env("OMPI_MCA_orte_base_help_aggregate", "0");
    if sys::is_root() {
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
        command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    }
    command.args(arguments).args(agent_command(plan)?);
    Ok(command)
}

/// mpirun's messages about ranks that exited, held back because the launcher reports the same.
#[derive(Clone, Default)]
pub struct MpirunMessages(Arc<Mutex<String>>);

impl MpirunMessages {
    /// Prints mpirun's output line by line, and holds back its messages about ranks that exited.
    pub fn read(&self, from: impl Read) {
        let mut blocks = MessageBlocks::default();
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.take(blocks.line(text));
            line.clear();
        }
        self.take(blocks.rest());
    }

    /// Prints what was held back, where nothing else explains the failure.
    pub fn show(&self) {
        show(&mem::take(
            &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner),
        ));
    }

    fn take(&self, text: Option<String>) {
        match text {
            None => {}
            Some(text) if is_exit_notice(&text) => {
                self.0
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push_str(&text);
            }
            Some(text) => show(&text),
        }
    }
}

fn show(text: &str) {
    for line in text.lines() {
        print_line(&format!("[mpirun] {line}"));
    }
}

fn is_exit_notice(text: &str) -> bool {
    [
        "Primary job  terminated normally, but",
        "mpirun noticed that process rank",
        "mpirun detected that one or more processes exited",
        "mpirun has exited due to process rank",
    ]
    .iter()
    .any(|start| text.starts_with(start))
}

/// Splits mpirun's output into messages: the text between two rules, or a single line.
#[derive(Default)]
struct MessageBlocks {
    open: Option<String>,
}

impl MessageBlocks {
    fn line(&mut self, line: String) -> Option<String> {
        let is_rule = line.len() > 60 && line.bytes().all(|byte| byte == b'-');
        match (&mut self.open, is_rule) {
            (None, true) => {
                self.open = Some(String::new());
                None
            }
            (None, false) => Some(line + "\n"),
            (Some(_), true) => self.open.take(),
            (Some(block), false) => {
                block.push_str(&line);
                block.push('\n');
                None
            }
        }
    }

    /// A message without its closing rule.
    fn rest(&mut self) -> Option<String> {
        self.open.take()
    }
}

/// Reads a stream of mpirun in a thread.
pub fn read_in_thread(
    remarks: &MpirunMessages,
    from: Option<impl Read + Send + 'static>,
) -> io::Result<Option<std::thread::JoinHandle<()>>> {
    let Some(from) = from else {
        return Ok(None);
    };
    let remarks = remarks.clone();
    let builder = std::thread::Builder::new().name("mpirun".into());
    builder.spawn(move || remarks.read(from)).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read_or_the_wrong_one_is_named() {
        assert_eq!(names("a:2,b.c-d:10").unwrap(), ["a", "b.c-d"]);
        assert_eq!(names("10.0.0.1").unwrap(), ["10.0.0.1"]);
        for (hosts, entry) in [
            ("", ""),
            ("a,,b", ""),
            ("a:0", "a:0"),
            ("a:x", "a:x"),
            ("a b", "a b"),
        ] {
            assert_eq!(
                names(hosts).unwrap_err().to_string(),
                format!(
                    "invalid --hosts {hosts:?}: {entry:?}: expected name or name:ranks, as in a:2,b:2"
                )
            );
        }
    }

    #[test]
    fn arguments_are_split_as_a_shell_does() {
        assert_eq!(
            words("--mca  btl 'tcp, self' -x A=\"b c\"d ''").unwrap(),
            ["--mca", "btl", "tcp, self", "-x", "A=b cd", ""]
        );
        assert!(words(" ").unwrap().is_empty());
        let error = words("-x 'A").unwrap_err();
        assert_eq!(
            error.to_string(),
            "--mpirun-args \"-x 'A\": a quote is not closed"
        );
    }

    #[test]
    fn messages_on_exited_ranks_are_held_back_and_others_are_printed() {
        let rule = "-".repeat(74);
        let text = format!(
            "{rule}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code.\n\
             {rule}\n{rule}\nmpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 \
             (Killed).\n{rule}\n"
        );
        let remarks = MpirunMessages::default();
        remarks.read(text.as_bytes());
        let kept = remarks.0.lock().unwrap().clone();
        assert_eq!(kept.lines().count(), 3, "{kept}");
        assert!(!kept.contains("--"), "{kept}");

        let mut blocks = MessageBlocks::default();
        assert_eq!(blocks.line("alone".into()).unwrap(), "alone\n");
        assert_eq!(blocks.line(rule.clone()), None);
        assert_eq!(blocks.line("There are not enough slots".into()), None);
        let block = blocks.line(rule).unwrap();
        assert_eq!(block, "There are not enough slots\n");
        assert!(!is_exit_notice(&block));
    }
}
