//! Tests of Slurm's compressed formats.

use proptest::prelude::*;

use super::node_list::{NodeListError, TasksPerNode, first_host};

#[test]
fn the_first_host_is_found() {
    for (list, host) in [
        ("node[01-04,07],gpu3", "node01"),
        ("gpu3,node[01-04]", "gpu3"),
        ("n[8-11]", "n8"),
        ("n[098-101]", "n098"),
        ("rack[0-1]n[1-2]-ib", "rack0n1-ib"),
        ("[1-2]", "1"),
        ("a[0-18446744073709551614]b[0-18446744073709551614]", "a0b0"),
    ] {
        assert_eq!(first_host(list).as_deref(), Ok(host));
    }
}

#[test]
fn other_formats_are_an_error() {
    use NodeListError::*;
    let error = |text: &str| first_host(text).unwrap_err();
    for text in ["", ",", "a,", ",a", "a,,b", "a[1],"] {
        assert_eq!(error(text), NoName, "{text}");
    }
    for text in ["a[", "a]", "a[1", "a1]", "a[[1]]", "a]1[", "a[1]]"] {
        assert_eq!(error(text), Brackets(text.into()), "{text}");
    }
    let zeros = "0".repeat(70_000);
    for range in [
        "",
        "-",
        "1-",
        "-1",
        "2-1",
        "x",
        "1-x",
        "1-2-3",
        "+1",
        " 1",
        "18446744073709551615",
        &zeros,
    ] {
        assert_eq!(
            error(&format!("a[3,{range}]")),
            Range(range.into()),
            "{range}"
        );
    }
}

/// Generates a name with one pair of brackets in compressed form, and the first host of the name.
fn name() -> impl Strategy<Value = (String, String)> {
    let range = (0u32..2000, 0u32..30, 1usize..6);
    let ranges = prop::collection::vec(range, 1..4);
    let plain = "[a-z][a-z0-9]{0,5}".prop_map(|name| (name.clone(), name));
    let short = ("[a-z]{1,6}", ranges, "(-[a-z]{1,3})?").prop_map(|(head, ranges, tail)| {
        let short = |(first, more, width): &(u32, u32, usize)| match more {
            0 => format!("{first:0width$}"),
            _ => format!("{first:0width$}-{:0width$}", first + more),
        };
        let inside: Vec<_> = ranges.iter().map(short).collect();
        let (number, _, width) = ranges[0];
        let first = format!("{head}{number:0width$}{tail}");
        (format!("{head}[{}]{tail}", inside.join(",")), first)
    });
    prop_oneof![plain, short]
}

proptest! {
    #[test]
    fn the_first_host_is_that_which_the_list_was_made_from(
        names in prop::collection::vec(name(), 1..5),
    ) {
        let (short, first): (Vec<_>, Vec<_>) = names.into_iter().unzip();
        prop_assert_eq!(first_host(&short.join(",")), Ok(first[0].clone()));
    }

    #[test]
    fn any_text_is_parsed_without_a_panic(text in "[a-b0-2\\[\\],\\- (x)é]{0,12}") {
        if let Ok(host) = first_host(&text) {
            prop_assert!(!host.is_empty());
        }
        if let Some(tasks) = TasksPerNode::parse(&text) {
            prop_assert_eq!(tasks.on(tasks.nodes()), None);
        }
    }

    #[test]
    fn tasks_expand_to_what_they_were_made_from(
        runs in prop::collection::vec((1usize..9, 1usize..6), 1..5),
    ) {
        let short = |(tasks, nodes): &(usize, usize)| match nodes {
            1 => tasks.to_string(),
            _ => format!("{tasks}(x{nodes})"),
        };
        let text: Vec<_> = runs.iter().map(short).collect();
        let long: Vec<usize> = runs
            .iter()
            .flat_map(|(tasks, nodes)| vec![*tasks; *nodes])
            .collect();
        let tasks = TasksPerNode::parse(&text.join(",")).unwrap();
        prop_assert_eq!(tasks.nodes(), long.len());
        prop_assert_eq!(tasks.total(), long.iter().sum::<usize>());
        for node in 0..=long.len() {
            prop_assert_eq!(tasks.on(node), long.get(node).copied());
        }
    }
}
