use super::ExpertHeatMap;
use crate::expert_metrics::{ExpertLoad, LayerCounts};
use crate::metrics::{MetricsRecord, RunMetrics};

fn load(step: usize, layers: &[&[u64]]) -> ExpertLoad {
    let layers = layers.iter().enumerate().map(|(number, load)| LayerCounts {
        layer: format!("blocks.{number}.moe"),
        load: load.to_vec(),
    });
    ExpertLoad {
        step,
        layers: layers.collect(),
    }
}

/// Returns layers in which every expert has the even share.
fn even(layers: usize, experts: usize) -> ExpertHeatMap {
    let row = vec![3; experts];
    ExpertHeatMap::new(&load(0, &vec![&row[..]; layers]))
}

/// Returns the number of rectangles of a color.
fn count(svg: &str, color: &str) -> usize {
    let is_of = |line: &&str| line.contains("<rect") && line.contains(color);
    svg.lines().filter(is_of).count()
}

const EVEN: &str = "#BEBEBE";

#[test]
fn each_load_has_its_shade() {
    let map = ExpertHeatMap::new(&load(
        800,
        &[
            &[20, 20, 20, 20, 20],
            &[0, 0, 100, 0, 0],
            &[8, 15, 20, 26, 31],
            &[0; 5],
        ],
    ));
    let wanted = "\
load of the experts in step 800
even share = 1: · 0.5 ░ 0.8 ▒ 1.25 ▓ 2 █
blocks.0.moe ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
blocks.1.moe ········████········
blocks.2.moe ····░░░░▒▒▒▒▓▓▓▓▓▓▓▓
blocks.3.moe
             0                  4
             expert
";
    assert_eq!(map.terminal(90), wanted);
}

#[test]
fn any_number_of_experts_fits_the_terminal() {
    for experts in [0, 1, 2, 8, 27, 64, 77, 78, 256, 1000] {
        for columns in [0, 40, 90] {
            let text = even(3, experts).terminal(columns);
            assert_eq!(text.lines().count(), 3 + 4, "{text}");
            for line in text.lines() {
                let fits = line.chars().count() <= columns.max(40);
                assert!(fits, "'{line}' is wider than {columns}");
            }
        }
    }
    let mut long = load(0, &[&[1, 1]]);
    long.layers[0].layer = format!("model.{}.blocks.17.moe", "decoder.".repeat(9));
    let text = ExpertHeatMap::new(&long).terminal(40);
    assert!(text.contains("…locks.17.moe ▒"), "{text}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 40),
        "{text}"
    );
}

#[test]
fn neighbours_share_a_cell_if_there_are_too_many() {
    let mut row = vec![4; 200];
    (row[0], row[1], row[2]) = (0, 4, 8);
    let map = ExpertHeatMap::new(&load(0, &[&row]));
    let cells = map.cells(77);
    assert_eq!((cells.experts, cells.columns), (3, 67));
    // The last cell has two experts, each with the even share.
    assert!(
        cells.rows[0]
            .iter()
            .all(|share| (share - 1.0).abs() < 1e-12)
    );
    let text = map.terminal(90);
    assert!(
        text.ends_with("199\n             expert (a cell is the mean of 3)\n"),
        "{text}"
    );
    assert!(map.svg().expect("draws").contains("\nexpert\n"));
    let svg = even(1, 300).svg().expect("draws");
    assert!(svg.contains("expert (a cell is the mean of 2)"));
}

#[test]
fn a_picture_has_axes_a_scale_and_the_numbers_that_fit() {
    let map = ExpertHeatMap::new(&load(800, &[&[20, 20, 20, 20], &[0, 0, 80, 0], &[0; 4]]));
    let svg = map.svg().expect("draws");
    let title = "Load of the experts in step 800";
    let scale = ["multiple of the even share", "0.9", "1.1"];
    for text in [title, "layer", "expert", "blocks.2.moe", "4.00", "0.00"]
        .iter()
        .chain(&scale)
    {
        assert!(svg.contains(&format!("\n{text}\n")), "{text} in {svg}");
    }
    // The scale has one rectangle of each color. A layer without tokens has no cells.
    assert_eq!(count(&svg, EVEN), 1 + 4);
    assert_eq!(
        (count(&svg, "#E8F6FF"), count(&svg, "#521D00")),
        (1 + 3, 1 + 1)
    );
    assert!(!svg.contains("NaN"));
}

#[test]
fn pictures_of_any_size_end_and_large_ones_stay_small() {
    for (layers, experts) in [(0, 0), (1, 0), (1, 1), (2, 24), (200, 8), (61, 5000)] {
        let svg = even(layers, experts).svg().expect("draws");
        assert!(svg.trim_end().ends_with("</svg>"), "{layers} {experts}");
    }
    // Narrow neighbours of the same color are one rectangle.
    let svg = even(61, 256).svg().expect("draws");
    assert_eq!(count(&svg, EVEN), 1 + 61);
    let svg = even(2, 64).svg().expect("draws");
    assert_eq!(count(&svg, EVEN), 1 + 2 * 64);
}

#[test]
fn the_last_load_of_a_file_is_drawn() {
    let run = MetricsRecord::Run(RunMetrics { version: 2 });
    assert_eq!(
        ExpertHeatMap::from_records(std::slice::from_ref(&run)),
        None
    );
    let [first, last] = [load(1, &[&[1, 3]]), load(3, &[&[2, 2]])];
    let mut records = vec![run.clone()];
    records.extend([&first, &last].map(|load| MetricsRecord::ExpertLoad(load.clone())));
    records.push(run);
    let map = ExpertHeatMap::from_records(&records);
    assert_eq!(map, Some(ExpertHeatMap::new(&last)));
}
