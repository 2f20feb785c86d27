"""The style of the HTML report: light, dark by the reader's setting, and print, which is always light.

Blue, vermilion, green and purple are those of Okabe and Ito, darkened or lightened to stand off the ground;
every series has a shape of its own besides.
"""

CSS = """
:root { color-scheme: light dark; --back: #ffffff; --fore: #1f2328; --dim: #59636e; --line: #d1d9e0; --soft: #f6f8fa;
  --c0: #57606a; --c1: #0072b2; --c2: #c04e00; --c3: #007d5a; --c4: #a8487f; --c5: #8f6400; --c6: #2f4b9b; }
@media screen and (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --fore: #e6edf3; --dim: #9198a1; --line: #3d444d; --soft: #151b23;
    --c0: #a9b1ba; --c1: #56b4e9; --c2: #ff8c42; --c3: #2fc495; --c4: #e38abf; --c5: #e3b341; --c6: #93a8f4; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1rem 3rem; background: var(--back); color: var(--fore);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
p, ul { margin: .5rem 0; } ul { padding-left: 1.25rem; } li { margin: .2rem 0; overflow-wrap: anywhere; }
.dim, figcaption { color: var(--dim); font-size: .875rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; background: var(--soft); white-space: normal; vertical-align: bottom; }
td.word, th.word { text-align: left; }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 5rem; }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
.faster { color: var(--c1); font-weight: 600; } .slower, .void { color: var(--c2); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } figure p { margin: 0 0 .25rem; font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; padding: 0; margin: .25rem 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 40rem; }
figure .key svg { display: inline; width: 1rem; height: 1rem; vertical-align: -.15rem; }
summary { cursor: pointer; margin: .5rem 0; }

svg { color: var(--fore); font: 13px system-ui, sans-serif; }
svg text { fill: currentColor; } svg .small { font-size: 11.5px; fill: var(--dim); } svg .head { font-weight: 600; }
svg .over { paint-order: stroke; stroke: var(--back); stroke-width: 4px; stroke-linejoin: round; }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); } .s3 { --c: var(--c3); } .s4 { --c: var(--c4); }
.s5 { --c: var(--c5); } .s6 { --c: var(--c6); }
.mark { fill: var(--c); } .pale { fill-opacity: .55; }
.hollow { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-dasharray: 2 1.5; }
.grid { stroke: var(--line); } .dotted { stroke-dasharray: 2 3; } .ring { fill: none; stroke: currentColor; }
.whisker { fill: none; stroke: var(--c); stroke-width: 2; } .mean { stroke: var(--c); stroke-width: 3; }
.dashed { stroke-width: 2; stroke-dasharray: 3 2; } .stroke { stroke: var(--c); stroke-opacity: .3; fill: none; }
.box { fill: var(--c); fill-opacity: .25; stroke: var(--c); } .trend { stroke: var(--c); stroke-opacity: .6; }
.over-time { fill: none; stroke: var(--c); stroke-opacity: .7; stroke-width: 1.5; }
.roof { fill: none; stroke: currentColor; stroke-width: 2; } .base { stroke: currentColor; stroke-dasharray: 4 3; }
.gap { stroke: var(--c); stroke-opacity: .6; stroke-dasharray: 1 3; }
.compute { fill: var(--c1); } .wait, .late { fill: url(#hatch); stroke: var(--c2); stroke-width: .75; }
.asking { fill: var(--c0); fill-opacity: .25; stroke: var(--c0); stroke-width: .75; } .amount { fill: var(--c0); }
.hatching { stroke: var(--c2); stroke-width: 2; } .reading { stroke: currentColor; stroke-width: 2; }
.halo { stroke: var(--back); stroke-width: 4; }

@media print {
  @page { margin: 14mm; }
  :root { color-scheme: light; font-size: 10pt; }
  body { max-width: none; padding: 0; }
  figure, tr, li { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } .scroll { overflow: visible; }
  table { font-size: 8pt; } th, td { padding: .2rem .4rem; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
