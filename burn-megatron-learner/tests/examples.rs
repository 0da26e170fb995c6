//! The examples, which check their own results.

use tempfile::tempdir;

#[allow(dead_code)]
#[path = "../examples/image_classifier.rs"]
mod image_classifier;
#[allow(dead_code)]
#[path = "../examples/one_to_many/main.rs"]
mod one_to_many;
#[allow(dead_code)]
#[path = "../examples/text_generation.rs"]
mod text_generation;

#[test]
fn text_generation_trains_and_resumes() {
    let folder = tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    text_generation::run(folder, None).unwrap();
    text_generation::run(folder, Some(3)).unwrap();
}

#[test]
fn the_image_classifier_trains_and_resumes() {
    let folder = tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    image_classifier::run(folder).unwrap();
    image_classifier::run(folder).unwrap();
}

#[test]
fn the_programs_of_the_page_run() {
    one_to_many::main().unwrap();
}

/// The diffs of the page are those between its programs.
#[test]
fn the_page_shows_the_programs() {
    const PROGRAMS: [&str; 5] = [
        include_str!("../examples/one_to_many/one_device.rs"),
        include_str!("../examples/one_to_many/data_parallel.rs"),
        include_str!("../examples/one_to_many/zero.rs"),
        include_str!("../examples/one_to_many/tensor_parallel.rs"),
        include_str!("../examples/one_to_many/pipeline.rs"),
    ];
    let page = include_str!("../../docs/src/learner.md");
    let diffs: Vec<_> = page.split("```diff\n").skip(1).collect();
    assert_eq!(diffs.len() + 1, PROGRAMS.len());
    for (programs, diff) in PROGRAMS.windows(2).zip(diffs) {
        let diff = diff.split("\n```").next().unwrap();
        for (sign, program) in ['-', '+'].into_iter().zip(programs) {
            let mut rest = program.lines();
            let shown = diff.lines().filter(|line| line.starts_with([' ', sign]));
            for line in shown {
                let found = rest.any(|own| own == &line[1..]);
                assert!(found, "not in the program, or in another order: {line}");
            }
        }
        // Without the lines of the diff both are the same.
        let unchanged = |sign: char, program: &str| {
            let shown = diff.lines().filter(|line| line.starts_with(sign)).count();
            program.lines().count() - shown
        };
        assert_eq!(unchanged('-', programs[0]), unchanged('+', programs[1]));
    }
}
