//! Slurm's compressed formats: host lists, of which the first host is needed, and numbers of tasks.
//!
//! A host list is `node[01-04,07],gpu3`: names separated by commas, with numbers and ranges of numbers in
//! brackets. Leading zeros of the first number of a range set the width of its numbers. With several brackets
//! in a name the last one varies fastest.

use super::vars::digits;

/// A host list that is not in Slurm's format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeListError {
    /// An empty list, or an empty name between two commas.
    #[error("a host name is empty: expected a list such as node1 or node[01-04,07],gpu3")]
    NoName,
    /// Brackets that are unbalanced or nested.
    #[error("unbalanced brackets in \"{0}\": expected a list such as node[01-04,07]")]
    Brackets(String),
    /// An invalid item between two commas in brackets.
    #[error("invalid range \"{0}\": expected a range such as 3, 3-7 or 03-07")]
    Range(String),
}

/// The first host of a list, all of which is checked.
pub(super) fn first_host(text: &str) -> Result<String, NodeListError> {
    let names = split_outside_brackets(text)?.into_iter();
    let hosts: Vec<String> = names.map(first_of_name).collect::<Result<_, _>>()?;
    Ok(hosts.into_iter().next().unwrap_or_default())
}

fn split_outside_brackets(text: &str) -> Result<Vec<&str>, NodeListError> {
    let brackets = || NodeListError::Brackets(text.into());
    let (mut names, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, letter) in text.char_indices() {
        match (letter, inside) {
            ('[', true) | (']', false) => return Err(brackets()),
            ('[', false) => inside = true,
            (']', true) => inside = false,
            (',', false) => {
                names.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    names.push(&text[start..]);
    if inside {
        return Err(brackets());
    }
    Ok(names)
}

/// The first host of a name with balanced brackets.
fn first_of_name(text: &str) -> Result<String, NodeListError> {
    if text.is_empty() {
        return Err(NodeListError::NoName);
    }
    let (mut host, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after
            .split_once(']')
            .ok_or_else(|| NodeListError::Brackets(text.into()))?;
        let numbers: Vec<&str> = inside
            .split(',')
            .map(first_of_range)
            .collect::<Result<_, _>>()?;
        host += before;
        host += numbers[0];
        rest = after;
    }
    Ok(host + rest)
}

/// The first number of a range, with its leading zeros.
fn first_of_range(text: &str) -> Result<&str, NodeListError> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (digits::<u64>(first), digits(last)) {
        // Names of hosts are short.
        (Some(low), Some(high)) if low <= high && high < u64::MAX && first.len() <= 20 => Ok(first),
        _ => Err(NodeListError::Range(text.into())),
    }
}

/// The tasks of a step on each node, from the compressed form `4(x2),3`, which is `4, 4, 3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TasksPerNode(Vec<(usize, usize)>);

impl TasksPerNode {
    /// `None` if the text is not in Slurm's format.
    pub fn parse(text: &str) -> Option<TasksPerNode> {
        let counts: Option<Vec<_>> = text.split(',').map(parse_count).collect();
        let tasks = TasksPerNode(counts?);
        tasks.total_checked().is_some().then_some(tasks)
    }

    /// The number of nodes.
    pub fn nodes(&self) -> usize {
        self.0.iter().map(|(_, nodes)| nodes).sum()
    }

    /// The number of tasks on all nodes.
    pub fn total(&self) -> usize {
        self.0.iter().map(|(tasks, nodes)| tasks * nodes).sum()
    }

    /// The number of tasks on one node.
    pub fn on(&self, mut node: usize) -> Option<usize> {
        for (tasks, nodes) in &self.0 {
            match node.checked_sub(*nodes) {
                None => return Some(*tasks),
                Some(rest) => node = rest,
            }
        }
        None
    }

    /// `None` if tasks or nodes overflow a `usize`.
    fn total_checked(&self) -> Option<usize> {
        self.0
            .iter()
            .try_fold(0usize, |sum, (_, nodes)| sum.checked_add(*nodes))?;
        self.0.iter().try_fold(0usize, |sum, (tasks, nodes)| {
            sum.checked_add(tasks.checked_mul(*nodes)?)
        })
    }
}

/// `4(x2)` or `4` as tasks and nodes.
fn parse_count(text: &str) -> Option<(usize, usize)> {
    match text.split_once("(x") {
        None => Some((digits(text)?, 1)),
        Some((tasks, nodes)) => Some((digits(tasks)?, digits(nodes.strip_suffix(')')?)?)),
    }
}
