//! Open MPI's mpirun: how it is called, and what it says.

use std::env;
use std::io::{self, BufRead, BufReader, Read};
use std::mem;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::LaunchError;
use super::plan::Plan;
use super::{keeper_command, program, say, sys};

/// Beginnings of the variables that ranks on other machines get too.
const HANDED_ON: [&str; 7] = [
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
    let first = said.lines().next().unwrap_or("--version says nothing");
    match first.contains("Open MPI") {
        true => Ok(path),
        false => Err(LaunchError::OtherMpirun {
            path,
            said: first.to_owned(),
        }),
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

/// The words of a line, as a shell cuts it: at blanks outside of quotes.
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

/// The call that starts the keepers of all ranks with `variables`.
pub fn command(
    plan: &Plan,
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
    let handed_on = own.filter(|name| HANDED_ON.iter().any(|start| name.starts_with(start)));
    let handed_on = handed_on.filter(|name| !is_new(name));
    for name in handed_on {
        command.args(["-x", &name]);
    }
    for (name, value) in variables {
        command.env(name, value).args(["-x", name]);
    }
    // Gathered, some messages get lost when the rank that fails ends at once.
    command.env("OMPI_MCA_orte_base_help_aggregate", "0");
    if sys::is_root() {
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
        command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    }
    command.args(arguments).args(keeper_command(plan)?);
    Ok(command)
}

/// What mpirun says of ranks that ended: the launcher says it shorter, and sooner.
#[derive(Clone, Default)]
pub struct Remarks(Arc<Mutex<String>>);

impl Remarks {
    /// Shows what mpirun writes, line by line, but keeps its remarks on ranks that ended.
    pub fn read(&self, from: impl Read) {
        let mut blocks = Blocks::default();
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.take(blocks.line(text));
            line.clear();
        }
        self.take(blocks.rest());
    }

    /// Shows what was kept: nobody else has explained the end.
    pub fn show(&self) {
        show(&mem::take(
            &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner),
        ));
    }

    fn take(&self, text: Option<String>) {
        match text {
            None => {}
            Some(text) if is_remark(&text) => {
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
        say(&format!("[mpirun] {line}"));
    }
}

fn is_remark(text: &str) -> bool {
    [
        "Primary job  terminated normally, but",
        "mpirun noticed that process rank",
        "mpirun detected that one or more processes exited",
        "mpirun has exited due to process rank",
    ]
    .iter()
    .any(|start| text.starts_with(start))
}

/// Cuts mpirun's output into messages: what stands between two rules, or else a line.
#[derive(Default)]
struct Blocks {
    open: Option<String>,
}

impl Blocks {
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

    /// A message that was cut off.
    fn rest(&mut self) -> Option<String> {
        self.open.take()
    }
}

/// Reads a stream of mpirun in a thread.
pub fn read_in_thread(
    remarks: &Remarks,
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
                    "--hosts {hosts:?}: {entry:?} is no host; name or name:ranks is, as in a:2,b:2"
                )
            );
        }
    }

    #[test]
    fn arguments_are_cut_as_a_shell_does() {
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
    fn remarks_on_ranks_are_kept_and_all_else_is_shown() {
        let rule = "-".repeat(74);
        let text = format!(
            "{rule}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code.\n\
             {rule}\n{rule}\nmpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 \
             (Killed).\n{rule}\n"
        );
        let remarks = Remarks::default();
        remarks.read(text.as_bytes());
        let kept = remarks.0.lock().unwrap().clone();
        assert_eq!(kept.lines().count(), 3, "{kept}");
        assert!(!kept.contains("--"), "{kept}");

        let mut blocks = Blocks::default();
        assert_eq!(blocks.line("alone".into()).unwrap(), "alone\n");
        assert_eq!(blocks.line(rule.clone()), None);
        assert_eq!(blocks.line("There are not enough slots".into()), None);
        let block = blocks.line(rule).unwrap();
        assert_eq!(block, "There are not enough slots\n");
        assert!(!is_remark(&block));
    }
}
