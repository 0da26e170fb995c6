//! The heat map as lines of text, with shades that are visible on light and dark backgrounds.

use super::ExpertHeatMap;

const MIN_COLUMNS: usize = 40;
/// The maximum width of a cell.
const MAX_CELL: usize = 4;
/// Upper limits of the shades, as multiples of the even share. Larger loads have the last shade.
const LIMITS: [f64; 4] = [0.5, 0.8, 1.25, 2.0];
const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];

pub(super) fn draw(map: &ExpertHeatMap, columns: usize) -> String {
    let columns = columns.max(MIN_COLUMNS);
    let names = map.rows.iter().map(|row| row.layer.chars().count()).max();
    let gutter = names.unwrap_or(0).clamp("layer".len(), columns / 3) + 1;
    let cells = map.cells(columns - gutter);
    let cell = ((columns - gutter) / cells.columns.max(1)).clamp(1, MAX_CELL);
    let mut text = format!("{}\n{}\n", map.title(), legend());
    for (row, shares) in map.rows.iter().zip(&cells.rows) {
        let name = shortened(&row.layer, gutter - 1);
        let shades = shares
            .iter()
            .map(|share| shade(*share).to_string().repeat(cell));
        let line = format!("{name:<gutter$}{}", shades.collect::<String>());
        text += line.trim_end();
        text.push('\n');
    }
    let last = map.rows.iter().map(|row| row.shares.len()).max();
    let last = last.unwrap_or(0).saturating_sub(1);
    text + &footer(gutter, cells.columns * cell, last, &cells.label(), columns)
}

fn shade(share: f64) -> char {
    if share.is_nan() {
        return ' ';
    }
    let place = LIMITS.iter().filter(|limit| share >= **limit).count();
    SHADES[place]
}

/// Returns a line with the shades and the limits between them.
fn legend() -> String {
    let mut text = format!("even share = 1: {}", SHADES[0]);
    for (limit, shade) in LIMITS.iter().zip(&SHADES[1..]) {
        text += &format!(" {limit} {shade}");
    }
    text
}

/// Returns the end of a name that is too long, because the end distinguishes the layers.
fn shortened(name: &str, most: usize) -> String {
    let length = name.chars().count();
    if length <= most {
        return name.into();
    }
    let end: String = name.chars().skip(length - most + 1).collect();
    format!("…{end}")
}

/// Returns the lines below the cells: the first and the last expert, and the label of the axis.
fn footer(gutter: usize, width: usize, last: usize, label: &str, columns: usize) -> String {
    let last = last.to_string();
    let between = width.saturating_sub(1 + last.len());
    let numbers = if between == 0 {
        "0".into() // too narrow for both
    } else {
        format!("0{:between$}{last}", "")
    };
    let indent = gutter.min(columns.saturating_sub(label.chars().count()));
    format!("{:gutter$}{numbers}\n{:indent$}{label}\n", "", "")
}
