"""How the report looks: one column, light and dark, and on paper."""

from __future__ import annotations

from hotset.report.svg_style import CLASSES, VARIABLES

PAGE = (
    VARIABLES
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif}
main,header,nav{max-width:1000px;margin:0 auto;padding:0 30px}
header{padding-top:44px}
h1{font-size:30px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:22px;margin:58px 0 8px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:0 0 8px}
p{max-width:76ch;margin:8px 0}
.lead{color:var(--soft);margin:0 0 22px}
a{color:var(--s0)}
nav ol{columns:2;column-gap:40px;padding-left:22px;margin:8px 0 0}
nav h2{border:0;margin:26px 0 0;padding:0;font-size:15px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:12px;margin:18px 0}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:24px;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px;line-height:1.35;display:block}
figure{margin:22px 0 30px;break-inside:avoid}
figcaption{color:var(--soft);font-size:14px;line-height:1.45;margin-top:8px;max-width:84ch}
.wide{overflow-x:auto}
.fig{display:block;max-width:100%;height:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;width:100%}
th{text-align:left;color:var(--soft);font-weight:600;border-bottom:1px solid var(--soft);padding:4px 14px 4px 0;
 vertical-align:bottom}
td{border-bottom:1px solid var(--line);padding:4px 14px 4px 0;vertical-align:top}
.r{text-align:right}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--panel);padding:1px 4px;border-radius:3px}
.tok{display:inline-block;font:13px ui-monospace,SFMono-Regular,Menlo,'Noto Sans Mono CJK SC',monospace;
 background:var(--panel);border:1px solid var(--line);border-radius:4px;padding:0 5px;margin:1px 4px 1px 0;
 white-space:pre}
.tok small{color:var(--soft);margin-left:5px}
footer{max-width:1000px;margin:50px auto 30px;padding:14px 30px;color:var(--soft);font-size:13px}
@media print{body{font-size:11pt}main,header,nav,footer{max-width:none;padding:0}header{padding-top:12pt}
 h2{break-after:avoid}section{break-inside:auto}.wide{overflow:visible}}
@media (max-width:640px){main,nav{padding:0 16px}header{padding:20px 16px 0}nav ol{columns:1}}
@media screen and (max-width:640px){.fig{max-width:none;width:680px}}
"""
    + CLASSES
)
