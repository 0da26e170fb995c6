//! Draws the memory of every pipeline rank during a training step as SVG.

use std::path::Path;

use plotters::prelude::*;

use super::{MemoryByKind, MemoryReport, MemorySample};
use burn_megatron::data_parallel::format_bytes;
use burn_megatron::pipeline::schedule::{StageTimes, simulate};
use burn_megatron_plot::{Area, FAINT, FONT, PlotError, TEXT, failed, render, write};

const WIDTH: u32 = 1100;
/// The height of the panel of a rank.
const ROW: u32 = 130;
const HEAD: u32 = 70;
/// The height of the labels of the time axis.
const FOOT: u32 = 40;
const LEFT: u32 = 96;
/// The maximum number of points that are drawn for a rank.
const MAX_POINTS: usize = 2000;
/// The maximum number of ranks. A picture with more ranks is slow to open.
const MAX_RANKS: usize = 64;

/// The color of each kind, in the order of [`MemoryByKind::kinds`]. The colors can be distinguished with red-green
/// color blindness.
const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(150, 150, 150),
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(225, 225, 225),
];
const LIMIT: RGBColor = RGBColor(180, 0, 0);

/// A point of a timeline: a time, and the memory from this time on.
type Point = (f64, MemoryByKind);

impl MemoryReport {
    /// Draws the memory during a training step as SVG, with one panel per pipeline rank.
    ///
    /// Each panel shows the kinds of memory as a stacked area chart over time. The optimizer step is at the end. The
    /// time is not measured: a forward of a stage takes one unit of time, and a backward takes two. If `limit` (a
    /// number of bytes) is set, it is drawn as a line.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if drawing fails, or if there are more than 64 pipeline ranks.
    pub fn svg(&self, title: &str, limit: Option<u64>) -> Result<String, PlotError> {
        let ranks = self.ranks.len();
        if ranks > MAX_RANKS {
            let message = format!("{ranks} pipeline ranks are more than {MAX_RANKS}");
            return Err(PlotError::Draw(message));
        }
        let timelines = self.timelines()?;
        let height = HEAD + ranks as u32 * ROW + FOOT;
        render((WIDTH, height), |area| {
            area.fill(&WHITE).map_err(failed)?;
            let (head, rows) = area.split_vertically(HEAD);
            self.draw_head(&head, title)?;
            let top = self.fullest().1.peak.total().max(limit.unwrap_or(0)) as f64 * 1.05;
            let ends = timelines.iter().flatten().map(|(time, _)| *time);
            let end = ends.fold(0.0, f64::max);
            let mut rest = rows;
            for (rank, timeline) in timelines.iter().enumerate() {
                let is_last = rank + 1 == ranks;
                let (row, below) = rest.split_vertically(if is_last { ROW + FOOT } else { ROW });
                rest = below;
                draw_rank(&row, rank, timeline, (end, top), limit, is_last)?;
            }
            Ok(())
        })
    }

    /// Draws the memory as [`MemoryReport::svg`] does, and writes the SVG to a file.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if drawing fails, and [`PlotError::Io`] if the file cannot be written.
    pub fn write_svg(&self, path: &Path, title: &str, limit: Option<u64>) -> Result<(), PlotError> {
        write(path, &self.svg(title, limit)?)
    }

    /// Returns the points in time at which the memory of each rank changes. The last point is the end of the step.
    fn timelines(&self) -> Result<Vec<Vec<Point>>, PlotError> {
        let times = StageTimes::uniform(self.schedule.stages(), 1.0, 1.0, 1.0, 0.0);
        let simulation = simulate(&self.schedule, &times).map_err(failed)?;
        let end = simulation.total();
        let ranks = self.ranks.iter().zip(&self.states).enumerate();
        let timelines = ranks.map(|(rank, (memory, state))| {
            let idle = memory.samples.first().map_or(memory.peak, |it| it.before);
            let mut points = vec![(0.0, idle)];
            for (span, sample) in simulation.timeline(rank).iter().zip(&memory.samples) {
                let MemorySample { peak, after, .. } = *sample;
                if span.action.kind.is_compute() {
                    points.extend([(span.start, peak), (span.end, after)]);
                }
            }
            // The optimizer step.
            points.push((end, MemoryByKind::state(state)));
            points.push((end + 1.0, MemoryByKind::state(state)));
            downsampled(&points)
        });
        Ok(timelines.collect())
    }

    fn draw_head(&self, area: &Area<'_>, title: &str) -> Result<(), PlotError> {
        let (rank, memory) = self.fullest();
        let title = format!(
            "{title}: {} at the peak of pipeline rank {rank}",
            format_bytes(memory.peak.total())
        );
        let style = (FONT, 20).into_font().color(&TEXT);
        let text = Text::new(title, (LEFT as i32, 12), style);
        area.draw(&text).map_err(failed)?;
        let mut x = LEFT as i32;
        for (kind, (name, _)) in memory.peak.kinds().into_iter().enumerate() {
            if !self.ranks.iter().any(|rank| rank.has(kind)) {
                continue;
            }
            let swatch = Rectangle::new([(x, 43), (x + 14, 57)], COLORS[kind].filled());
            area.draw(&swatch).map_err(failed)?;
            let style = (FONT, 14).into_font().color(&TEXT);
            let text = Text::new(name, (x + 20, 43), style);
            area.draw(&text).map_err(failed)?;
            x += 48 + 7 * name.len() as i32;
        }
        Ok(())
    }
}

impl super::RankMemory {
    /// Returns whether the rank has bytes of this kind at any time.
    fn has(&self, kind: usize) -> bool {
        let samples = self.samples.iter().map(|sample| &sample.peak);
        let mut all = samples.chain([&self.peak]);
        all.any(|memory| memory.kinds()[kind].1 > 0)
    }
}

/// Reduces the number of points so that they can be drawn. The points are divided into intervals of time. Each interval
/// keeps only its point with the most bytes, which is moved to the start of the interval.
fn downsampled(points: &[Point]) -> Vec<Point> {
    let Some((last, points)) = points.split_last() else {
        return vec![];
    };
    let size = points.len().div_ceil(MAX_POINTS).max(1);
    let most = points.chunks(size).filter_map(|chunk| {
        let most = chunk.iter().map(|(_, memory)| memory);
        let most = most.max_by_key(|memory| memory.total())?;
        Some((chunk[0].0, *most))
    });
    most.chain([*last]).collect()
}

/// Returns the largest binary unit that is at most `bytes`: its size in bytes and its name.
fn unit(bytes: f64) -> (f64, &'static str) {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let units = units.map(|(name, power)| (f64::from(1 << power), name));
    let found = units.into_iter().find(|(size, _)| bytes >= *size);
    found.unwrap_or((1.0, "B"))
}

fn draw_rank(
    area: &Area<'_>,
    rank: usize,
    timeline: &[Point],
    (end, top): (f64, f64),
    limit: Option<u64>,
    is_last: bool,
) -> Result<(), PlotError> {
    let (unit, name) = unit(top);
    let mut chart = ChartBuilder::on(area)
        .margin_top(6)
        .margin_right(24)
        .x_label_area_size(if is_last { FOOT } else { 0 })
        .y_label_area_size(LEFT)
        .build_cartesian_2d(0.0..end, 0.0..top / unit)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(TEXT)
        .x_labels(if is_last { 12 } else { 0 })
        .y_labels(4)
        .y_label_formatter(&|number| format!("{number} {name}"))
        .label_style((FONT, 13).into_font().color(&TEXT))
        .axis_desc_style((FONT, 15).into_font().color(&TEXT))
        .x_desc("time, in forwards of a stage")
        .y_desc(format!("rank {rank}"))
        .draw()
        .map_err(failed)?;
    for (kind, color) in COLORS.into_iter().enumerate() {
        let band = band(timeline, kind, unit);
        chart
            .draw_series([Polygon::new(band, color.filled())])
            .map_err(failed)?;
    }
    if let Some(limit) = limit {
        let limit = limit as f64 / unit;
        let line = [(0.0, limit), (end, limit)];
        chart
            .draw_series(LineSeries::new(line, LIMIT.stroke_width(2)))
            .map_err(failed)?;
    }
    Ok(())
}

/// Returns the outline of the area of a kind of memory, which is stacked on the areas of the previous kinds. The
/// outline goes to the right along the top of the area, and back along its bottom.
fn band(timeline: &[Point], kind: usize, unit: f64) -> Vec<(f64, f64)> {
    let height = |memory: &MemoryByKind, kinds: usize| {
        let kinds = memory.kinds().into_iter().take(kinds);
        kinds.map(|(_, bytes)| bytes as f64).sum::<f64>() / unit
    };
    let edge = |kinds: usize| {
        let steps = timeline.windows(2).flat_map(move |pair| {
            let height = height(&pair[0].1, kinds);
            [(pair[0].0, height), (pair[1].0, height)]
        });
        steps.collect::<Vec<_>>()
    };
    let mut outline = edge(kind + 1);
    outline.extend(edge(kind).into_iter().rev());
    outline
}
