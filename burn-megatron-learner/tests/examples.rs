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
fn every_layout_of_the_page_trains() {
    for layout in one_to_many::LAYOUTS {
        let loss = one_to_many::run(layout).unwrap();
        assert!(loss.is_finite() && loss > 0.0, "{layout}: {loss}");
    }
    let refused = one_to_many::run("expert").unwrap_err().to_string();
    insta::assert_snapshot!(
        refused,
        @"invalid --layout \"expert\": expected one of one-device, data, zero, tensor, pipeline"
    );
}

/// The code of the page is in the program.
#[test]
fn the_page_shows_the_program() {
    const FILES: [&str; 3] = [
        include_str!("../examples/one_to_many/main.rs"),
        include_str!("../examples/one_to_many/learner.rs"),
        include_str!("../examples/one_to_many/parallel.rs"),
    ];
    let page = include_str!("../../docs/src/learner.md");
    for shown in page.split("```rust,ignore\n").skip(1) {
        let shown = shown.split("```").next().unwrap();
        let is_in = FILES.iter().any(|file| file.contains(shown));
        assert!(is_in, "not in the program:\n{shown}");
    }
}
