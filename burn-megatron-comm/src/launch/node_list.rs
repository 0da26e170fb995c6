//! Slurm's compressed formats: host lists, and numbers of tasks.
//!
//! A host list is `node[01-04,07],gpu3`: names separated by commas, with numbers and ranges of numbers in
//! brackets. Leading zeros of the first number of a range set the width of its numbers. With several brackets
//! in a name the last one varies fastest.

/// A host list in compressed form: hosts are expanded lazily.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeList(Vec<Vec<NamePart>>);

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

#[derive(Clone, Debug, PartialEq, Eq)]
enum NamePart {
    Text(String),
    Numbers(Vec<Range>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    first: u64,
    last: u64,
    width: usize,
}

impl NodeList {
    /// Reads the whole list.
    pub fn parse(text: &str) -> Result<NodeList, NodeListError> {
        split_outside_brackets(text)?
            .into_iter()
            .map(parse_name)
            .collect::<Result<_, _>>()
            .map(NodeList)
    }

    /// The hosts in the order of the list.
    pub fn hosts(&self) -> impl Iterator<Item = String> {
        self.0
            .iter()
            .flat_map(|parts| (0..count_hosts(parts)).map(|index| name(parts, index)))
    }
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

/// Parses a name with balanced brackets.
fn parse_name(text: &str) -> Result<Vec<NamePart>, NodeListError> {
    if text.is_empty() {
        return Err(NodeListError::NoName);
    }
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let (inside, after) = after
            .split_once(']')
            .ok_or_else(|| NodeListError::Brackets(text.into()))?;
        parts.push(NamePart::Text(before.into()));
        let ranges = inside.split(',').map(parse_range);
        parts.push(NamePart::Numbers(ranges.collect::<Result<_, _>>()?));
        rest = after;
    }
    parts.push(NamePart::Text(rest.into()));
    Ok(parts)
}

fn parse_range(text: &str) -> Result<Range, NodeListError> {
    let wrong = || NodeListError::Range(text.into());
    let number = |digits: &str| {
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        digits.parse::<u64>().map_err(|_| wrong())
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = Range {
        first: number(first)?,
        last: number(last)?,
        width: first.len(),
    };
    // Limits the digits of a host, and the number of hosts to a u64.
    if range.first <= range.last && range.last < u64::MAX && range.width <= 20 {
        Ok(range)
    } else {
        Err(wrong())
    }
}

impl Range {
    fn len(&self) -> u64 {
        self.last - self.first + 1
    }
}

/// The number of hosts that a name expands to.
fn count_hosts(parts: &[NamePart]) -> u64 {
    parts
        .iter()
        .map(NamePart::count_hosts)
        .fold(1, u64::saturating_mul)
}

impl NamePart {
    fn count_hosts(&self) -> u64 {
        match self {
            NamePart::Text(_) => 1,
            NamePart::Numbers(ranges) => ranges.iter().map(Range::len).fold(0, u64::saturating_add),
        }
    }

    fn text(&self, mut index: u64) -> String {
        let ranges = match self {
            NamePart::Text(text) => return text.clone(),
            NamePart::Numbers(ranges) => ranges,
        };
        for range in ranges {
            if index < range.len() {
                return format!("{:0width$}", range.first + index, width = range.width);
            }
            index -= range.len();
        }
        String::new()
    }
}

/// The host at `index` of those that a name expands to.
fn name(parts: &[NamePart], mut index: u64) -> String {
    let mut texts: Vec<String> = Vec::with_capacity(parts.len());
    for part in parts.iter().rev() {
        texts.push(part.text(index % part.count_hosts()));
        index /= part.count_hosts();
    }
    texts.reverse();
    texts.concat()
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
    let number = |digits: &str| {
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse::<usize>().ok()).flatten()
    };
    match text.split_once("(x") {
        None => Some((number(text)?, 1)),
        Some((tasks, nodes)) => Some((number(tasks)?, number(nodes.strip_suffix(')')?)?)),
    }
}
