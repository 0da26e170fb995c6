//! The list of exceptions: `xtask/docs-commands.tsv`.

use super::blocks::DocsCommand;

pub const LIST: &str = "xtask/docs-commands.tsv";

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// The commands cannot run here. The note is the reason.
    Skip,
    /// The commands run, but not in CI. The note is the reason.
    Slow,
    /// The commands end with this exit code. The note is the reason.
    Exit(i32),
    /// A script that runs before the commands of a page. The note is the script.
    Prepare,
}

#[derive(Debug)]
struct Entry {
    line: usize,
    kind: Kind,
    /// A command, the beginning of several commands, or a page.
    what: String,
    note: String,
}

impl Entry {
    fn is_of(&self, command: &DocsCommand) -> bool {
        let name = command.name();
        match (self.kind, self.what.strip_suffix(" ..")) {
            (Kind::Prepare, _) => command.page == self.what,
            (_, Some(beginning)) => name.starts_with(beginning),
            (_, None) => name == self.what,
        }
    }
}

pub struct List(Vec<Entry>);

impl List {
    /// Reads the list. Empty lines and lines that begin with `# ` are skipped.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut entries: Vec<Entry> = vec![];
        for (line, text) in (1..).zip(text.lines()) {
            if text.trim().is_empty() || text.starts_with("# ") {
                continue;
            }
            let wrong = || {
                format!(
                    "{LIST}:{line}: expected `skip`, `slow` or `exit N`, a command and a reason, or `prepare`, a page and a \
                     script, separated by tabs; got {text:?}"
                )
            };
            let fields: Vec<_> = text.split('\t').map(str::trim).collect();
            let [kind, what, note] = fields[..] else {
                return Err(wrong());
            };
            let kind = match kind.split_once(' ') {
                None if kind == "skip" => Kind::Skip,
                None if kind == "slow" => Kind::Slow,
                None if kind == "prepare" => Kind::Prepare,
                Some(("exit", code)) => Kind::Exit(code.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            };
            if what.is_empty() || note.is_empty() {
                return Err(wrong());
            }
            let (what, note) = (what.to_string(), note.to_string());
            entries.push(Entry {
                line,
                kind,
                what,
                note,
            });
        }
        Ok(Self(entries))
    }

    /// Checks that each entry matches a command, and that no two entries of one kind match the same command.
    pub fn check(&self, commands: &[DocsCommand]) -> Result<(), String> {
        let unused = self
            .0
            .iter()
            .filter(|entry| !commands.iter().any(|command| entry.is_of(command)));
        let unused = unused.map(|entry| {
            let Entry { line, what, .. } = entry;
            format!("{LIST}:{line}: no command of the README and the book matches {what:?}: remove or correct the entry")
        });
        let doubled = commands.iter().filter_map(|command| {
            let mut of_command = self
                .of(command)
                .filter(|entry| matches!(entry.kind, Kind::Skip | Kind::Slow));
            let (first, second) = (of_command.next()?, of_command.next()?);
            let (first, second) = (first.line, second.line);
            Some(format!(
                "{LIST}:{second}: {:?} is listed in line {first} too",
                command.name()
            ))
        });
        let wrong: Vec<_> = unused.chain(doubled).collect();
        if wrong.is_empty() {
            Ok(())
        } else {
            Err(wrong.join("\n"))
        }
    }

    fn of(&self, command: &DocsCommand) -> impl Iterator<Item = &Entry> {
        self.0
            .iter()
            .filter(|entry| entry.kind != Kind::Prepare && entry.is_of(command))
    }

    /// Returns the reason why the command cannot run here.
    pub fn skipped(&self, command: &DocsCommand) -> Option<&str> {
        let entry = self.of(command).find(|entry| entry.kind == Kind::Skip);
        entry.map(|entry| &entry.note[..])
    }

    /// Returns whether CI leaves the command out.
    pub fn is_slow(&self, command: &DocsCommand) -> bool {
        self.of(command).any(|entry| entry.kind == Kind::Slow)
    }

    /// Returns the exit code that the command must have.
    pub fn exit_code(&self, command: &DocsCommand) -> i32 {
        let code = |entry: &Entry| match entry.kind {
            Kind::Exit(code) => Some(code),
            _ => None,
        };
        self.of(command).find_map(code).unwrap_or(0)
    }

    /// Returns the scripts of a page.
    pub fn preparations(&self, page: &str) -> impl Iterator<Item = &str> {
        let of_page = move |entry: &&Entry| entry.kind == Kind::Prepare && entry.what == page;
        self.0.iter().filter(of_page).map(|entry| &entry.note[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::docs_commands::blocks::commands;

    fn command(text: &str) -> DocsCommand {
        commands("page.md", &format!("```sh\n{text}\n```\n"))
            .unwrap()
            .remove(0)
    }

    #[test]
    fn entries_name_commands_and_their_beginnings() {
        let text = "# comment\nskip\tpip install ..\tnetwork\nslow\tverify --all\t6 minutes\nexit 1\tfail\tas the page says\n\
                    prepare\tpage.md\ttouch my.txt\n";
        let list = List::parse(text).unwrap();
        let all = ["pip install x", "verify --all", "fail", "verify"].map(command);
        assert_eq!(list.check(&all), Ok(()));
        let [pip, slow, fail, plain] = &all;
        assert_eq!(list.skipped(pip), Some("network"));
        assert!(list.is_slow(slow) && !list.is_slow(plain) && list.skipped(plain).is_none());
        assert_eq!([fail, plain].map(|it| list.exit_code(it)), [1, 0]);
        assert_eq!(
            list.preparations("page.md").collect::<Vec<_>>(),
            ["touch my.txt"]
        );
        assert_eq!(list.preparations("other.md").count(), 0);
    }

    #[test]
    fn an_entry_without_a_command_and_two_entries_of_one_are_errors() {
        let error = List::parse("slow\tgone\tx\nprepare\tgone.md\tx\n")
            .unwrap()
            .check(&[command("a")]);
        let error = error.unwrap_err();
        assert!(
            error.contains(":1: no command") && error.contains(":2: no command"),
            "{error}"
        );
        let error = List::parse("slow\ta\tx\nskip\ta ..\tx\n")
            .unwrap()
            .check(&[command("a")]);
        assert!(
            error
                .unwrap_err()
                .contains(":2: \"a\" is listed in line 1 too")
        );
    }

    #[test]
    fn a_wrong_line_is_named() {
        for wrong in [
            "skip\ta",
            "later\ta\tx",
            "exit\ta\tx",
            "exit one\ta\tx",
            "skip\t\tx",
        ] {
            let error = List::parse(&format!("# list\n{wrong}\n"))
                .map(drop)
                .unwrap_err();
            assert!(
                error.starts_with("xtask/docs-commands.tsv:2: expected"),
                "{error}"
            );
        }
    }
}
